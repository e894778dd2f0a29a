#!/usr/bin/env bash
# GRPO on a real pretrained model, from nothing to a picture of its curves.  [SEED=1] bash launch/quickstart.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh

run_dir=${RUN_DIR:-outputs/quickstart}
python -m spmd_rl.models smollm2-135m-instruct
rm -rf "$run_dir"

gpus=$(num_gpus)
nproc=2
overrides=()
if [ "$gpus" -gt 0 ]; then
    # A power of two divides the prompts of a step.
    nproc=1
    while [ $((nproc * 2)) -le "$gpus" ] && [ "$nproc" -lt 4 ]; do nproc=$((nproc * 2)); done
elif grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
    overrides+=(engine.dtype=bfloat16)
fi
export OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=2
torchrun --standalone --nproc-per-node "$nproc" -m spmd_rl.train --config-name quickstart \
    trainer.run_dir="$run_dir" trainer.seed="${SEED:-0}" "${overrides[@]}" "$@"
python -m spmd_rl.report "$run_dir"
