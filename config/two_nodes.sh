#!/usr/bin/env bash
# Two nodes of eight GPUs, by torchrun: the same command on both, with the first one's address.
#   HEAD=<first node's address> bash config/two_nodes.sh
# Model, data and out_dir lie on a file system that both nodes see: checkpoints are written by all.
exec torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "${HEAD:?}:29500" \
    kto.py --config config/llama8b_fsdp.yaml "$@"
