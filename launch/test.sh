#!/usr/bin/env bash
# The tests, environment included.  bash launch/test.sh [--all] [pytest arguments]
#   bash launch/test.sh                     what every change must pass
#   bash launch/test.sh --all               the slow ones too, and those for a GPU where there is one
#   bash launch/test.sh tests/unit -k batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
if [ "${SPMD_RL_VENV:-}" != none ] && ! python -c 'import math_verify, mypy, reasoning_gym, wandb' 2>/dev/null; then
    python -m pip install -qq --requirement requirements/test.txt
fi

select="not slow and not gpu"
if [ "${1:-}" = --all ]; then
    shift
    select="not gpu"
    [ "$(num_gpus)" -gt 0 ] && select=""
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest -m "$select" "$@"
