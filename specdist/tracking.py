"""Owns the names of metrics and how a run is tracked: W&B where there is a key, W&B offline where there is none.

The complete record is always `metrics.jsonl` in the run's directory (training/callbacks.py); W&B is a view of it.
"""

import logging
import netrc
import os
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

MEAN_ACCEPTED_LENGTH = "acceptance/mean_accepted_length"
MEAN_ACCEPTED_LENGTH_LOW = "acceptance/mean_accepted_length_low"
MEAN_ACCEPTED_LENGTH_HIGH = "acceptance/mean_accepted_length_high"
ACCEPTANCE_RATE = "acceptance/acceptance_rate"
GAIN_OVER_UNTRAINED = "acceptance/gain_over_untrained"
GAIN_OVER_CHAMPION = "acceptance/gain_over_champion"


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def prepare_wandb(report_to: list[str], run_directory: Path, group: str) -> None:
    """Set W&B's environment before the trainer starts it: project, directory, one run id per attempt, one group.

    Without a key it logs offline, and the log says how to send it later. Values that the user set are kept.
    """
    if "wandb" not in report_to:
        return
    if not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_PROJECT", "specdist")
    os.environ.setdefault("WANDB_DIR", str(run_directory))
    os.environ.setdefault("WANDB_RUN_GROUP", group)
    os.environ.setdefault("WANDB_SILENT", "true")
    # A new id per attempt: two offline attempts with one id would overwrite each other when they are sent
    os.environ["WANDB_RUN_ID"] = uuid.uuid4().hex[:8]
    if os.environ.get("WANDB_MODE") == "offline":
        logger.info(
            "W&B logs offline (no key found); send it later with: wandb sync %s/wandb/offline-run-*", run_directory
        )
