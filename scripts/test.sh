#!/usr/bin/env bash
# Makes or reuses the environment, then lint, types and tests. Arguments go to pytest: scripts/test.sh -k replay -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_environment test
# Nothing here needs a network: a request for the hub fails at once instead of waiting.
export HF_HUB_OFFLINE=1

say "lint"
ruff check .
say "types"
mypy
say "tests"
# One process per core, each with one thread: models in tests are too small to share. A process keeps to whole files,
# whose fixtures are then made once, until another has nothing left to do.
OMP_NUM_THREADS=1 pytest --numprocesses auto --dist worksteal "$@"
say "all passed"
