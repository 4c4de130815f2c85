#!/usr/bin/env bash
# Two nodes with eight GPUs each, started by torchrun. Run the same command on both nodes:
#   HEAD=<address of the first node> bash config/two_nodes.sh
# Model, data and out_dir must be on a file system that both nodes see, because all processes write the checkpoints.
exec torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "${HEAD:?}:29500" \
    kto.py --config config/llama8b_fsdp.yaml "$@"
