"""Distil a small draft model from a target: data → training → acceptance of every checkpoint → gate → registry.

    accelerate launch recipes/distill_draft.py [--config recipes/configs/<target>/draft.yaml] [--key value …]

Without arguments it makes the demo's draft model. A finished stage is skipped, an interrupted one continues.
Exit status of this process: 0 promoted, 3 held, 4 rejected, 2 an error that says what to do. `accelerate launch` makes
1 of all but 0: `python recipes/distill_draft.py` starts one process and keeps it; OUTPUT_DIR/gate.json has the verdict.
"""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig

from specdist.config import RecipeConfig
from specdist.dataset.token_statistics import completion_counts, sample_texts
from specdist.drafter_config import DraftArguments, TrainedSize
from specdist.drafters.causal_lm import DraftModelDrafter, load_draft_model, load_for_drafting, trainable_draft
from specdist.drafters.initial import check_draft_model, write_initial_draft
from specdist.drafters.vocabulary import DraftVocabulary, read_vocabulary
from specdist.evaluation.acceptance import DraftModelScorer
from specdist.evaluation.fit_table import fit_lines
from specdist.export.draft_model import export_draft_model
from specdist.provenance import atomic_directory
from specdist.stages.advise import draft_fit
from specdist.stages.arguments import parse
from specdist.stages.assess import Loader, assess_export, best_checkpoint, checkpoint_metrics, primary_acceptance
from specdist.stages.data import evaluation_data, training_data
from specdist.stages.distillation import distillation
from specdist.stages.release import release
from specdist.stages.run import Run, dtype_of, run_recipe
from specdist.stages.start import start
from specdist.stages.train import train
from specdist.target import Target
from specdist.training.checkpoints import checkpoint_step
from specdist.training.draft import check_training, draft_trainer

DEMO_CONFIG = "recipes/configs/smollm2-135m/draft.yaml"


def initial_draft(run: Run, examples: Dataset) -> Path:
    """The untrained draft model on disk, made once."""
    directory, arguments = run.directory / "init", run.config.model
    with run.state.main_process_first():
        if not directory.exists():
            counts = completion_counts(examples, run.target.identity.vocab_size) if arguments.draft_vocab_size else None
            with atomic_directory(directory) as temporary:
                write_initial_draft(temporary, arguments, run.target, sample_texts(examples), counts)
    return directory


def draft_loader(run: Run) -> Loader:
    """How a draft model is read from the run's checkpoints, and from its export, which stands alone."""

    def load(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, DraftVocabulary]:
        base = None if path == run.export else run.directory / "init"
        return load_for_drafting(path, run.target, dtype, run.device, base=base)

    return Loader(
        scorer=lambda path: DraftModelScorer(*load(path, dtype_of(run.config.target.eval_dtype))),
        drafter=lambda path, target: DraftModelDrafter(*load(path, target.dtype)),
    )


def main() -> int:
    config: RecipeConfig = parse(DraftArguments, SFTConfig, default_config=DEMO_CONFIG)

    def check(target: Target) -> TrainedSize:
        check_training(config.training, on_policy=config.objective.on_policy_share > 0)
        return check_draft_model(config.model, target)

    def preview(target: Target) -> list[str]:
        return fit_lines(draft_fit(target, config.target, config.model))

    run = start(config, "draft_model", check=check, preview=preview)
    if run is None:
        return 0
    loader = draft_loader(run)
    data = training_data(run, max_length=config.training.max_length)
    eval_sets = evaluation_data(run, need_states=False)
    if config.release.only_data:
        return 0

    init = initial_draft(run, data.examples)
    primary_acceptance(run, lambda: loader.scorer(init), eval_sets, step=0)
    train(
        run,
        lambda arguments: draft_trainer(
            trainable_draft(init, config.model, run.device, seed=config.training.seed),
            run.target.tokenizer,
            arguments=arguments,
            vocabulary=read_vocabulary(init),
            freeze_embeddings=config.model.freeze_embeddings,
            **vars(distillation(run, data)),
        ),
        checkpoint_metrics(run, loader, eval_sets),
    )
    best, points = best_checkpoint(run)

    if run.is_main and not run.export.exists():
        export_draft_model(
            load_draft_model(best, dtype_of("float32"), base=init),
            run.target,
            run.export,
            dtype=dtype_of(config.target.target_dtype),
            num_speculative_tokens=config.evaluation.num_speculative_tokens,
            checkpoint_step=checkpoint_step(best),
            vocabulary_ids=read_vocabulary(init),
        )
    run.state.wait_for_everyone()
    return release(run, assess_export(run, loader, eval_sets, points, data.manifest), data.manifest)


if __name__ == "__main__":
    run_recipe(main)
