"""Owns the watch over training: that each step's losses and gradient, and each saved weight, are finite.

Steps are watched on their device and asked about when the trainer logs or saves, so that no step waits for the host.
Shapes: P named parts of a loss (heads, or an objective's terms).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdist.errors import SpecdistError

_REMEDY = (
    "training stops here, and earlier checkpoints stay. Lower learning_rate, or train in bfloat16 or float32 instead "
    "of float16"
)


class NotFinite(SpecdistError):
    """A loss, a gradient or a weight is NaN or infinite."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: not finite; {_REMEDY}")


@dataclass
class _Step:
    """What is known of a step: of each of its batches, the examples and which parts of the loss were finite [1 + P]."""

    members: list[Tensor]
    losses: list[Tensor]
    gradient: Tensor  # bool

    def is_finite(self) -> Tensor:
        """Whether everything was: bool, on the device."""
        return torch.cat([*self.losses, self.gradient[None]]).all()


class StepWatch(TrainerCallback):
    """Remembers of every step since the last question what was finite, and raises NotFinite at a log or a save."""

    def __init__(self, parts: Sequence[str], examples: Dataset) -> None:
        """`parts`: names of the P parts that the losses come with; `examples`: what the batches' members are."""
        self.parts, self.examples = ["loss", *parts], examples
        self._members: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._steps: dict[int, _Step] = {}

    def begin(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """A step starts, on these batches."""
        self._members, self._losses = [batch["members"] for batch in batches], []

    def add_losses(self, loss: Tensor, parts: Tensor) -> None:
        """The loss of the step's next batch, and its parts [P]."""
        self._losses.append(torch.isfinite(torch.cat([loss[None], parts]).detach()))

    def end(self, trainer: Trainer, gradient_norm: Tensor | float | None) -> Tensor | float | None:
        """The trainer's current step ends, with this norm (None where DeepSpeed keeps it), which is returned."""
        finite = torch.ones((), dtype=torch.bool, device=trainer.args.device)
        if gradient_norm is not None and not trainer.args.fp16:  # an overflow there is skipped, the loss scaled down
            whole = gradient_norm.full_tensor() if isinstance(gradient_norm, DTensor) else gradient_norm
            finite = torch.isfinite(torch.as_tensor(whole, device=finite.device))
        self._steps[trainer.state.global_step + 1] = _Step(self._members, self._losses, finite)
        return gradient_norm

    def check(self) -> None:
        """Raise NotFinite where one of the steps since the last call was not finite, and forget them."""
        steps, self._steps = self._steps, {}
        if not steps or bool(torch.stack([step.is_finite() for step in steps.values()]).all()):
            return
        bad = [number for number, step in steps.items() if not step.is_finite()]
        more = f" (nor are {len(bad) - 1} of the {len(steps) - 1} others since the last log)" if bad[1:] else ""
        raise NotFinite(f"step {bad[0]}: {self._describe(steps[bad[0]])}{more}")

    def _describe(self, step: _Step) -> str:
        finite = torch.stack(step.losses).cpu()  # [batches, 1 + P]
        if finite.all():
            return "the gradient"
        parts = [name for name, ok in zip(self.parts, finite.all(dim=0), strict=True) if not ok]
        batches = [members for members, ok in zip(step.members, finite.all(dim=1), strict=True) if not ok]
        rows = [self.examples[i]["id"] for members in batches for i in members.tolist()]
        return f"{', '.join(parts)} of the rows {', '.join(rows[:8])}{' …' if rows[8:] else ''}"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        args.logging_nan_inf_filter = False  # it would log other losses in place of those

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_log or control.should_save:
            self.check()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.check()


def check_weights(checkpoint: Path) -> None:
    """Raise NotFinite where a weight in the safetensors files of a checkpoint is NaN or infinite."""
    for path in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 # not a mapping
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise NotFinite(f"{path}: {name}")
