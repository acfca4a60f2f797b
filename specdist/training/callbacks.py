"""Owns what happens around training steps: the metrics file, the acceptance of each checkpoint, when to stop."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdist import provenance
from specdist.training.checkpoints import checkpoint_path, is_stalled, mark_complete, rotate
from specdist.training.finite import NotFinite


class MetricsFile(TrainerCallback):
    """Appends every logged value to `metrics.jsonl`. Raises NotFinite at the first that is NaN or infinite.

    On resuming, lines after the checkpoint's step are dropped, so that each step stands there once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drop what was logged after `step`, and a line that a kill cut off; returns what stays."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        provenance.write_text(self.path, "".join(line + "\n" for line in kept))
        return [json.loads(line) for line in kept]

    def append(self, step: int, values: dict[str, float]) -> None:
        """Add one line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 1), **values}) + "\n")

    def resume(self, step: int, values: dict[str, float]) -> None:
        """Go on from the checkpoint of `step`, whose acceptance is `values`: a kill may have come before its line."""
        if not any(line["step"] == step and values.keys() & line.keys() for line in self.keep_until(step)):
            self.append(step, values)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.keep_until(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        values = dict(logs or {})
        if args.fp16 and not math.isfinite(values.get("grad_norm", 0.0)):
            del values["grad_norm"]  # an overflow: the step was skipped, and the loss is scaled down
        bad = {key: value for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        if bad:
            raise NotFinite(f"step {state.global_step}: {bad}")
        if state.is_world_process_zero:
            self.append(state.global_step, values)


class CheckpointAcceptance(TrainerCallback):
    """Marks each saved checkpoint complete, measures its acceptance from disk and logs that as metrics.

    Then checkpoints over `save_total_limit` are deleted, never the best nor the newest, and training stops where
    `early_stopping_patience` checkpoints in a row were no better (0: never). Both are decided by `lower_bounds`, which
    reads what was measured (training/checkpoints.py). Raises NotFinite on a checkpoint with weights that are not.
    """

    trainer: Trainer  # set by `run_training`

    def __init__(
        self,
        evaluate: Callable[[Path], dict[str, float]],
        lower_bounds: Callable[[], dict[int, float]],
        *,
        save_total_limit: int | None = None,
        early_stopping_patience: int = 0,
    ) -> None:
        self.evaluate = evaluate
        self.lower_bounds = lower_bounds
        self.save_total_limit = save_total_limit
        self.early_stopping_patience = early_stopping_patience

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        directory = Path(str(args.output_dir))
        checkpoint = checkpoint_path(directory, state.global_step)
        self.trainer.accelerator.wait_for_everyone()  # each process writes files of its own
        if state.is_world_process_zero:
            mark_complete(checkpoint)
        self.trainer.accelerator.wait_for_everyone()
        # A resumed run does not measure again what was measured, so measuring must not draw from training's RNG
        with torch.random.fork_rng():
            values = self.evaluate(checkpoint)
        self.trainer.log(values)
        lower_bounds = self.lower_bounds()
        if state.is_world_process_zero:
            rotate(directory, lower_bounds, self.save_total_limit)
        if is_stalled(lower_bounds, self.early_stopping_patience):
            control.should_training_stop = True


def run_training(trainer: Trainer, *, resume_from: Path | None, callbacks: list[TrainerCallback]) -> None:
    """Train to the end with `callbacks`, from a checkpoint where there is one."""
    for callback in callbacks:
        trainer.add_callback(callback)
        if isinstance(callback, CheckpointAcceptance):
            callback.trainer = trainer
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
