"""Distil a small draft model from a target: data → training → acceptance of every checkpoint → gate → registry.

    accelerate launch recipes/distill_draft.py [--config recipes/configs/<target>/draft.yaml] [--key value …]

Without arguments it makes the demo's draft model. A finished stage is skipped, an interrupted one continues.
Exit status: 0 promoted, 3 held, 4 rejected, 2 an error that says what to do.
"""

from pathlib import Path

from trl import SFTConfig

from specdist.config import DraftArguments, RecipeConfig
from specdist.drafters.causal_lm import (
    DraftModelDrafter,
    check_draft_model,
    load_draft_model,
    make_draft_model,
)
from specdist.evaluation.acceptance import DraftModelScorer
from specdist.evaluation.fit_table import fit_lines
from specdist.export.draft_model import export_draft_model
from specdist.provenance import atomic_directory
from specdist.stages.advise import draft_fit
from specdist.stages.arguments import parse
from specdist.stages.assess import Loader, assess_export, best_checkpoint, checkpoint_metrics, primary_acceptance
from specdist.stages.data import evaluation_data, training_data
from specdist.stages.release import release
from specdist.stages.run import Run, dtype_of, run_recipe, start
from specdist.stages.train import train
from specdist.target import Target
from specdist.training.checkpoints import checkpoint_step
from specdist.training.draft import draft_trainer

DEMO_CONFIG = "recipes/configs/smollm2-135m/draft.yaml"


def initial_draft(run: Run) -> Path:
    """The untrained draft model on disk, made once."""
    directory, arguments = run.directory / "init", run.config.model
    with run.state.main_process_first():
        if not directory.exists():
            model = make_draft_model(arguments.init, arguments.draft_layers, run.target)
            with atomic_directory(directory) as temporary:
                model.save_pretrained(temporary)
    return directory


def main() -> int:
    config: RecipeConfig = parse(DraftArguments, SFTConfig, default_config=DEMO_CONFIG)

    def check(target: Target) -> int:
        return check_draft_model(config.model.init, config.model.draft_layers, target)

    def preview(target: Target) -> list[str]:
        return fit_lines(draft_fit(target, config.target, config.model))

    run = start(config, "draft_model", check=check, preview=preview)
    if run is None:
        return 0
    eval_dtype, vocab_size = dtype_of(config.target.eval_dtype), run.target.identity.vocab_size
    loader = Loader(
        scorer=lambda path: DraftModelScorer(load_draft_model(path, eval_dtype, run.device), vocab_size),
        drafter=lambda path, target: DraftModelDrafter(load_draft_model(path, target.dtype, run.device), vocab_size),
    )

    examples, manifest = training_data(run, max_length=config.training.max_length)
    eval_sets = evaluation_data(run, need_states=False)
    if config.release.only_data:
        return 0

    init = initial_draft(run)
    primary_acceptance(run, lambda: loader.scorer(init), eval_sets, step=0)
    train(
        run,
        lambda arguments: draft_trainer(
            load_draft_model(init, dtype_of("float32"), run.device),
            run.target.tokenizer,
            examples,
            arguments,
            freeze_embeddings=config.model.freeze_embeddings,
        ),
        checkpoint_metrics(run, loader, eval_sets),
    )
    best, points = best_checkpoint(run)

    if run.is_main and not run.export.exists():
        export_draft_model(
            load_draft_model(best, dtype_of("float32")),
            run.target,
            run.export,
            dtype=dtype_of(config.target.target_dtype),
            num_speculative_tokens=config.evaluation.num_speculative_tokens,
            checkpoint_step=checkpoint_step(best),
        )
    run.state.wait_for_everyone()
    return release(run, assess_export(run, loader, eval_sets, points, manifest))


if __name__ == "__main__":
    run_recipe(main)
