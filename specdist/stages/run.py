"""Owns what a run of a recipe is: its configuration, target and prompts, where its artefacts lie, and how it ends."""

import errno
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from specdist.config import RecipeConfig
from specdist.dataset.prompts import PromptSet
from specdist.errors import SpecdistError
from specdist.gate_policy import GatePolicy
from specdist.registry.store import Registry
from specdist.target import Target

logger = logging.getLogger(__name__)

_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # where a file should be written


@dataclass
class Run:
    """One run of a recipe: its configuration, target, prompts, and where its artefacts lie."""

    config: RecipeConfig
    kind: str
    target: Target
    train_prompts: PromptSet
    eval_prompts: PromptSet
    policy: GatePolicy
    registry: Registry
    state: PartialState
    lock: FileLock

    @property
    def directory(self) -> Path:
        return Path(self.config.training.output_dir)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def export(self) -> Path:
        return self.directory / "export"

    @property
    def context_length(self) -> int:
        """Longest prompt with answer, in tokens."""
        data = self.config.data
        longest = data.max_prompt_tokens + max(data.train_max_new_tokens, data.eval_max_new_tokens)
        return data.context_length or self.target.context_length or longest

    @property
    def is_main(self) -> bool:
        return bool(self.state.is_main_process)

    @property
    def device(self) -> torch.device:
        return self.state.device

    def target_model(self, dtype_name: str, device: str | None = None) -> PreTrainedModel:
        """The target in "float32", "bfloat16" or "float16", on this process's device unless another is given."""
        placement = None if device else self.config.target.target_device_map
        return self.target.load_model(dtype_of(dtype_name), device or self.device, placement)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a configured name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def run_recipe(body: Callable[[], int]) -> None:
    """Call a recipe's body and exit with its status; what specdist raises becomes one clear line and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("httpx", "alembic", "mlflow", "huggingface_hub", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    disable_progress_bar()  # bars of loading and saving; training and our own stages show theirs
    try:
        status = body()
    except SpecdistError as error:
        logger.error("error: %s", error)
        status = 2
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise  # with its traceback: a fault of ours, or of the machine
        logger.error("error: %s; make room or mend permissions, and start the run again: it goes on", error)
        status = 2
    sys.exit(status)


def report_to(training: Any) -> list[str]:
    """The names of the trackers that the trainer reports to."""
    return [training.report_to] if isinstance(training.report_to, str) else list(training.report_to or [])
