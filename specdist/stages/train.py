"""Owns the training stage: resume from the last complete checkpoint, measure each one that is saved, stop when done.

Done is after the last epoch, or where `early_stopping_patience` checkpoints in a row brought no better acceptance.
"""

import logging
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from transformers import Trainer

from specdist import provenance, tracking
from specdist.stages.assess import forget_after, lower_bounds
from specdist.stages.process import free_memory
from specdist.stages.run import Run, report_to
from specdist.training.callbacks import CheckpointAcceptance, MetricsFile, run_training
from specdist.training.checkpoints import checkpoint_step, is_last, is_stalled, last_complete_checkpoint, rotate

logger = logging.getLogger(__name__)

DONE_FILE = "done.json"


def train(run: Run, make_trainer: Callable[[Any], Trainer], measure: Callable[[Path], dict[str, float]]) -> None:
    """Train to the end, or do nothing where that has been done. `make_trainer` gets the trainer's arguments."""
    done = run.checkpoints / DONE_FILE
    if done.exists():
        logger.info("training: finished before, %s", provenance.read_json(done))
        return
    metrics = MetricsFile(run.directory / "metrics.jsonl")
    resume_from, values = _resume(run, metrics, measure)
    limit, patience = run.config.training.save_total_limit, run.config.evaluation.early_stopping_patience
    if not (resume_from and (is_last(resume_from) or is_stalled(lower_bounds(run), patience))):
        arguments = copy(run.config.training)
        arguments.output_dir = str(run.checkpoints)
        arguments.save_total_limit = None  # the trainer's own rotation knows no best
        if run.is_main:
            step = checkpoint_step(resume_from) if resume_from else 0
            tracking.start_wandb(report_to(arguments), arguments.run_name, step=step, values=values)
        acceptance = CheckpointAcceptance(
            measure, lambda: lower_bounds(run), save_total_limit=limit, early_stopping_patience=patience
        )
        run_training(make_trainer(arguments), resume_from=resume_from, callbacks=[metrics, acceptance])
        del acceptance
        free_memory()  # the trainer refers to itself, and its optimizer holds twice the weights
    if run.is_main:
        bounds = lower_bounds(run)
        rotate(run.checkpoints, bounds, limit)  # a kill may have come between the last measurement and this
        record = {"steps": max(bounds, default=0), "stopped_early": is_stalled(bounds, patience)}
        logger.info("training: finished, %s", record)
        provenance.write_json(done, record)
    run.state.wait_for_everyone()


def _resume(
    run: Run, metrics: MetricsFile, measure: Callable[[Path], dict[str, float]]
) -> tuple[Path | None, dict[str, float]]:
    """The checkpoint to go on from, and what was measured of it; what was recorded after it is dropped.

    Raises ArtifactError where checkpoints are there, but none from which training goes on exactly.
    """
    values: dict[str, float] = {}
    with run.state.main_process_first():  # which removes what cannot be resumed
        checkpoint = last_complete_checkpoint(run.checkpoints, is_main_process=run.is_main)
    if run.is_main:
        forget_after(run, checkpoint_step(checkpoint) if checkpoint else 0)
    run.state.wait_for_everyone()
    if checkpoint:
        logger.info("training: continues from %s", checkpoint)
        values = measure(checkpoint)
        if run.is_main:
            metrics.resume(checkpoint_step(checkpoint), values)
    return checkpoint, values
