#!/usr/bin/env bash
# A vLLM that is always started with the same words serves each champion in turn: before and after a promotion and a
# rollback, by the registry's path and by its Hugging Face cache; with tokens per second beside those without a drafter.
#
#   scripts/check_serving.sh                        every champion in runs/registry, over the demo target
#   scripts/check_serving.sh --target DIRECTORY --registry DIRECTORY
#   scripts/check_serving.sh --help                 all arguments, those of check_serving.py
#
# It needs both environments, specdist's and vLLM's; for their variables see environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_vllm
prepare_environment demo
PYTHONPATH="$ROOT" exec python scripts/check_serving.py --vllm-python "$VLLM_VENV/bin/python" "$@"
