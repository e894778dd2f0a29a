#!/usr/bin/env bash
# The tests, environment included.  bash launch/test.sh [--all] [pytest arguments]
#   bash launch/test.sh                     what every change must pass, and after it engine=veomni in its own environment
#   bash launch/test.sh --all               the slow ones too, and those for a GPU where there is one
#   bash launch/test.sh tests/unit -k batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh

has_packages() {
    python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' "$@"
}

if [ "${SPMD_RL_VENV:-}" != none ] && ! has_packages math_verify megatron mypy peft reasoning_gym torchtitan wandb; then
    python -m pip install -qq --requirement requirements/test.txt
fi

select="not slow and not gpu" veomni="not test_contract and not reshards"
if [ "${1:-}" = --all ]; then
    shift
    select="not gpu" veomni=""
    [ "$(num_gpus)" -gt 0 ] && select=""
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python -m pytest -m "$select" "$@"
# engine=veomni has an environment of its own; where nothing is to be installed, one that is named.
if [ $# -eq 0 ] && { [ "${SPMD_RL_VENV:-}" != none ] || [ -n "${SPMD_RL_VEOMNI_VENV:-}" ]; }; then
    bash launch/veomni.sh python -m pytest -m "$select" -k "$veomni" tests/spmd/test_veomni.py tests/spmd/test_engine_contract.py
fi
