"""Owns what happens around training steps: the metrics file, checkpoints, acceptance of each, a stop on NaN."""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdist import provenance
from specdist.errors import SpecdistError

logger = logging.getLogger(__name__)

COMPLETE_FILE = "complete.json"
_RESUME_ONLY_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")


def checkpoint_step(checkpoint: Path) -> int:
    """The global step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[-1])


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints that were written to their end, in the order of their steps."""
    found = [p for p in directory.glob("checkpoint-*") if (p / COMPLETE_FILE).exists()]
    return sorted(found, key=checkpoint_step)


def last_complete_checkpoint(directory: Path, *, is_main_process: bool) -> Path | None:
    """The checkpoint to resume from. What a killed run left half-written is removed by the main process."""
    complete = complete_checkpoints(directory)
    if is_main_process:
        for path in directory.glob("checkpoint-*"):
            if path not in complete:
                logger.info("removing %s, which an interrupted run left incomplete", path)
                shutil.rmtree(path)
    return complete[-1] if complete else None


class NonFiniteLoss(SpecdistError):
    """The loss or the gradient is NaN or infinite."""


class MetricsFile(TrainerCallback):
    """Appends every logged value to `metrics.jsonl`, and stops training at the first that is not finite.

    On resuming, lines after the checkpoint's step are dropped, so that each step stands there once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").split("\n")
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= state.global_step]
            provenance.write_text(self.path, "".join(line + "\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        bad = {k: v for k, v in (logs or {}).items() if isinstance(v, float) and not math.isfinite(v)}
        if bad:
            raise NonFiniteLoss(
                f"step {state.global_step}: {bad} is not finite; training stops here, and earlier checkpoints stay. "
                "Lower learning_rate, or train in bfloat16 or float32 instead of float16"
            )
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"step": state.global_step, "time": round(time.time(), 1), **(logs or {})})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


class CheckpointAcceptance(TrainerCallback):
    """Marks each saved checkpoint complete, then measures its acceptance from disk and logs that as metrics."""

    def __init__(self, evaluate: Callable[[Path], dict[str, float]]) -> None:
        self.evaluate = evaluate
        self.trainer: Trainer | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        directory = Path(str(args.output_dir))
        checkpoint = directory / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            provenance.write_json(checkpoint / COMPLETE_FILE, {"step": state.global_step})
            for earlier in complete_checkpoints(directory)[:-1]:
                for name in _RESUME_ONLY_FILES:  # only the newest is resumed from; weights of all stay
                    (earlier / name).unlink(missing_ok=True)
        if self.trainer is not None:
            self.trainer.accelerator.wait_for_everyone()
            # A resumed run does not measure again what was measured, so measuring must not draw from training's RNG
            with torch.random.fork_rng():
                values = self.evaluate(checkpoint)
            self.trainer.log(values)


def run_training(trainer: Trainer, *, resume_from: Path | None, callbacks: list[TrainerCallback]) -> None:
    """Train to the end with `callbacks`, from a checkpoint where there is one."""
    for callback in callbacks:
        trainer.add_callback(callback)
        if isinstance(callback, CheckpointAcceptance):
            callback.trainer = trainer
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
