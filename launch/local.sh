#!/usr/bin/env bash
# Training on this machine: one process per GPU, or 2 on a machine without.  [NPROC=N] bash launch/local.sh ARGUMENTS
#   bash launch/local.sh --config-name tiny trainer.total_steps=5
#   NPROC=4 bash launch/local.sh model.path=/models/qwen3-0.6b data.train=train.jsonl
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"

nproc=${NPROC:-$(num_gpus)}
[ "$nproc" -gt 0 ] || nproc=2
# Threads of one rank wait by spinning: more ranks x threads than cores is many times slower.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}
exec torchrun --standalone --nproc-per-node "$nproc" -m spmd_rl.train "$@"
