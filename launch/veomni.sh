#!/usr/bin/env bash
# Runs a command in the environment of engine=veomni, which vLLM cannot share.  bash launch/veomni.sh [COMMAND ...]
#   bash launch/veomni.sh torchrun --nproc-per-node 2 -m spmd_rl.train --config-name tiny engine=veomni rollout=hf
#   bash launch/veomni.sh                makes the environment, no more (on a login node)
#   SPMD_RL_VEOMNI_VENV=folder   where it lives (default: .venv-veomni in this checkout); none: the environment that is active now
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export SPMD_RL_VENV=${SPMD_RL_VEOMNI_VENV:-$root/.venv-veomni} SPMD_RL_REQUIREMENTS=veomni
source "$root/launch/env.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}
[ $# -eq 0 ] || exec "$@"
