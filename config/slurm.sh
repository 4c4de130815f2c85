#!/usr/bin/env bash
# Two nodes with eight GPUs each, started by SLURM:
#   sbatch config/slurm.sh
# SLURM sends SIGTERM two minutes before the time limit. The run then saves a checkpoint and ends, and the same command
# continues it. If one process fails, srun ends the others, which would otherwise wait for it.
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 8
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 8
#SBATCH --time 8:00:00
#SBATCH --signal TERM@120
exec srun --kill-on-bad-exit=1 python kto.py --config config/llama8b_fsdp.yaml \
    --out_dir "out/slurm-${NAME:-run}" --resume auto "$@"
