#!/usr/bin/env bash
# Holds the engines on vLLM against the one on transformers: same greedy tokens, and no row lost where a server dies.
#
#   scripts/check_engines.sh                        over the demo target
#   scripts/check_engines.sh --target DIRECTORY
#   scripts/check_engines.sh --help                 all arguments, those of check_engines.py
#
# It needs both environments, specdist's and vLLM's; for their variables see environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_vllm
prepare_environment demo
PYTHONPATH="$ROOT" exec python scripts/check_engines.py --vllm-python "$VLLM_VENV/bin/python" "$@"
