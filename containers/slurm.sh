#!/bin/bash
# A job on Slurm: sbatch containers/slurm.sh JOB STORE [OPTION…]. The first node runs the job, the others sample,
# score and train. Not run on Slurm: tests/unit/test_cluster_files.py runs it with stand-ins for srun, scontrol and ray.
#SBATCH --job-name=mopd
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

job=$1 store=$2
shift 2
port=${MOPD_RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE RAY_AUTH_TOKEN  # srun passes the environment on, AWS_… too
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Without CPUs and GPUs for Ray: the first node evaluates.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --block --port="$port" --num-cpus=0 --num-gpus=0 --include-dashboard=false &
timeout 300 bash -c "until ray health-check --address '$head:$port'; do sleep 2; done"
srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
  ray start --block --address="$head:$port" &

mopd run "$job" --store "$store" --ray "$head:$port" --set work="\"${TMPDIR:-/tmp}/mopd-$SLURM_JOB_ID\"" "$@"
