#!/usr/bin/env bash
# Opens champions of the registry in vLLM and holds what it does against what was measured; fails where they disagree.
#
#   scripts/check_vllm.sh                           every champion in runs/registry, over the demo target
#   scripts/check_vllm.sh --drafter NAME --target DIRECTORY
#   scripts/check_vllm.sh --help                    all arguments, those of check_vllm.py
#
# It needs the environment of vLLM alone; for its variables see environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_vllm
# specdist is not installed there: only its contracts are imported, from this repository.
PYTHONPATH="$ROOT" exec "$VLLM_VENV/bin/python" scripts/check_vllm.py "$@"
