#!/usr/bin/env bash
# From a fresh clone to measured drafters: environment, demo target, a draft model, Medusa heads, the results.
# Arguments go to both recipes, for example: scripts/quickstart.sh --seed 1
# Repeated, each stage whose inputs have not changed is skipped. The exit status is 0 if both drafters were promoted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

# Control-C ends the script too, not only the recipe that runs.
trap 'exit 130' INT

prepare_environment demo

say "preparing the demo target (about a minute and 93 MB the first time)"
python -m specdist.demo

launch_config=accelerate_configs/cpu.yaml
if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    launch_config=accelerate_configs/single.yaml
fi

status=0
run_recipe() {
    say "recipes/$1.py, launched with $launch_config"
    # The launcher turns every failure into exit status 1; --quiet keeps its own traceback from burying the recipe's.
    if accelerate launch --quiet --config_file "$launch_config" "recipes/$1.py" "${@:2}"; then
        say "recipes/$1.py: done"
    else
        say "recipes/$1.py: failed or not promoted; its last lines above say why"
        status=1
    fi
}
run_recipe distill_draft "$@"
run_recipe train_medusa "$@"

say "results"
python scripts/summary.py || status=1
exit "$status"
