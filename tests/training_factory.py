"""Owns the settings with which tests train: a step of SGD whose change of the weights is their gradient, on the CPU."""

from pathlib import Path
from typing import Any


def sgd_settings(directory: Path, **others: Any) -> dict[str, Any]:
    """Arguments of TrainingArguments or SFTConfig; `others` add to them or replace them."""
    settings = {
        "output_dir": str(directory),
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return settings | others
