"""Owns the names of metrics and how a run is tracked: W&B where its server answers, W&B offline where it does not.

The complete record is always `metrics.jsonl` in the run's directory (training/callbacks.py); W&B is a view of it. So
nothing here ever stops a run, and every wait on a server is bounded.
"""

import glob
import http.client
import logging
import netrc
import os
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from specdist.provenance import sha256_bytes
from specdist.redaction import redacted_arguments, without_credentials

logger = logging.getLogger(__name__)

MEAN_ACCEPTED_LENGTH = "acceptance/mean_accepted_length"
MEAN_ACCEPTED_LENGTH_LOW = "acceptance/mean_accepted_length_low"
MEAN_ACCEPTED_LENGTH_HIGH = "acceptance/mean_accepted_length_high"
ACCEPTANCE_RATE = "acceptance/acceptance_rate"
GAIN_OVER_UNTRAINED = "acceptance/gain_over_untrained"
GAIN_OVER_CHAMPION = "acceptance/gain_over_champion"

PROBE_SECONDS = 3.0
_STEP = "train/global_step"  # as the trainer's callback calls it
_INIT_SECONDS, _FINISH_SECONDS = "20", "30"  # W&B's own limits are 90 s, and none
_OURS = "specdist-"  # how ids of W&B runs begin that no user gave


def _base_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = _base_url().split("://")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def offline_reason() -> str:
    """Why nothing can be sent to W&B now: the mode, no key, or a server that does not answer in time; "" if it can."""
    url = without_credentials(_base_url())
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        return f"WANDB_MODE is {mode}"
    if not _has_wandb_key():
        return "no key found (run `wandb login`, or set WANDB_API_KEY)"
    try:
        with urllib.request.urlopen(f"{_base_url()}/healthz", timeout=PROBE_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} answers with status {error.code}" if error.code >= 500 else ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url} does not answer ({error})"


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
    os.environ.setdefault("WANDB_INIT_TIMEOUT", _INIT_SECONDS)
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_SECONDS)
    if os.environ.get("WANDB_RUN_ID", _OURS).startswith(_OURS):
        _new_run_id(_stem(run_directory))
    if os.environ.get("WANDB_MODE") == "offline":
        logger.info("W&B logs offline (no key found); it is sent by `specdist sync`")


def _stem(run_directory: Path) -> str:
    """How the ids of all attempts of the run in this directory begin."""
    return f"{_OURS}{sha256_bytes(str(run_directory.absolute()).encode())[:8]}"


def _new_run_id(stem: str) -> None:
    """A new id per attempt: two offline attempts with one id would overwrite each other when they are sent."""
    os.environ["WANDB_RUN_ID"] = f"{stem}-{uuid.uuid4().hex[:8]}"


def offline_runs(run_directory: Path) -> Path:
    """Where W&B writes the offline runs of the run in this directory, as a path whose last part is a glob pattern.

    A directory of the user's (WANDB_DIR) may hold those of other runs, which are not ours to send.
    """
    run_id = os.environ.get("WANDB_RUN_ID", _OURS)
    name = f"{_stem(run_directory)}-*" if run_id.startswith(_OURS) else glob.escape(run_id)
    return Path(os.environ.get("WANDB_DIR") or run_directory) / "wandb" / f"offline-run-*-{name}"


def start_wandb(
    report_to: list[str], name: str | None, *, step: int = 0, values: dict[str, float] | None = None
) -> None:
    """Open the W&B run that the trainer's callback logs to: offline where the server does not answer or refuses.

    The callback would open it itself, and end the training where that fails; where W&B cannot even write offline it
    finds one that records nothing. `values`: the acceptance of the checkpoint of `step` that training goes on from; the
    attempt before may have been killed before it logged them.
    """
    if "wandb" not in report_to:
        return
    import wandb

    if os.environ.get("WANDB_MODE", "online") == "online" and (reason := offline_reason()):
        _go_offline(reason)
    try:
        _open_run(name)
    except Exception as error:  # of any kind, also of what wandb is made of: training has metrics.jsonl
        _go_offline(_in_a_line(error))
        try:
            _open_run(name)
        except Exception as again:
            logger.warning("W&B records nothing of this run: %s; metrics.jsonl has all of it", _in_a_line(again))
            wandb.init(mode="disabled")
    wandb.define_metric(_STEP)
    wandb.define_metric("*", step_metric=_STEP, step_sync=True)
    if values:
        wandb.log({_STEP: step, **{f"train/{key}": value for key, value in values.items()}})


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _open_run(name: str | None) -> None:
    """What the environment says, said to wandb at each call: it reads the environment once in a process."""
    import wandb

    said = os.environ
    settings = wandb.Settings(
        init_timeout=float(said.get("WANDB_INIT_TIMEOUT", _INIT_SECONDS)),
        finish_timeout=float(said.get("WANDB_FINISH_TIMEOUT", _FINISH_SECONDS)),
        x_disable_meta=redacted_arguments(sys.argv) != sys.argv,  # which holds the command line as it is
    )
    if url := said.get("WANDB_BASE_URL"):
        settings.base_url = url
    wandb.init(
        project=said.get("WANDB_PROJECT"),
        group=said.get("WANDB_RUN_GROUP"),
        id=said.get("WANDB_RUN_ID"),
        dir=said.get("WANDB_DIR"),
        mode=said.get("WANDB_MODE", "online"),  # type: ignore[arg-type] # a literal there
        name=name,
        settings=settings,
    )


def _go_offline(reason: str) -> None:
    logger.warning("W&B logs offline: %s; it is sent by `specdist sync`", reason)
    os.environ["WANDB_MODE"] = "offline"
    if (run_id := os.environ.get("WANDB_RUN_ID", _OURS)).startswith(_OURS):
        _new_run_id(run_id.rpartition("-")[0])
