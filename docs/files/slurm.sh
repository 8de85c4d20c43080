#!/bin/bash
# agentrl on Slurm: one Ray node per machine, the run on the first. Start it with: sbatch slurm.sh run.yaml
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

config=${1:?"usage: sbatch slurm.sh run.yaml"}
port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

# Ray authenticates its nodes with this token; all of them read it from the environment.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
    ray start --head --node-ip-address "$address" --port "$port" --disable-usage-stats --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --exclude="$head" \
        bash -c "until ray health-check --address $address:$port; do sleep 2; done; exec ray start --address $address:$port --block" &
fi

# The run waits up to --start-timeout for its places. SIGTERM ends it cleanly; the same command resumes it.
srun --nodes=1 --ntasks=1 --overlap -w "$head" bash -c "
    until ray health-check --address $address:$port; do sleep 2; done
    exec agentrl train --config $config --ray-address $address:$port --device cuda \
        --actor-num-nodes 1 --actor-num-gpus-per-node $SLURM_GPUS_ON_NODE" &
run=$!
trap 'kill -TERM $run' TERM
wait $run || wait $run # the first ends at the signal, the second when the run has stopped
