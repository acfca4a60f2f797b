"""Owns the training stage: resume from the last complete checkpoint, measure each one that is saved, stop when done."""

import logging
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from transformers import Trainer

from specdist import provenance
from specdist.stages.run import Run
from specdist.training.callbacks import (
    CheckpointAcceptance,
    MetricsFile,
    last_complete_checkpoint,
    run_training,
)

logger = logging.getLogger(__name__)

DONE_FILE = "done.json"


def train(run: Run, make_trainer: Callable[[Any], Trainer], measure: Callable[[Path], dict[str, float]]) -> None:
    """Train to the end, or do nothing where that has been done. `make_trainer` gets the trainer's arguments."""
    done = run.checkpoints / DONE_FILE
    if done.exists():
        logger.info("training: finished before, %s", provenance.read_json(done))
        return
    resume_from = last_complete_checkpoint(run.checkpoints, is_main_process=run.is_main)
    run.state.wait_for_everyone()
    if resume_from:
        logger.info("training: continues from %s", resume_from)
    arguments = copy(run.config.training)
    arguments.output_dir = str(run.checkpoints)
    trainer = make_trainer(arguments)
    run_training(
        trainer,
        resume_from=resume_from,
        callbacks=[MetricsFile(run.directory / "metrics.jsonl"), CheckpointAcceptance(measure)],
    )
    if run.is_main:
        provenance.write_json(done, {"steps": trainer.state.global_step, "epochs": trainer.state.epoch})
    run.state.wait_for_everyone()
