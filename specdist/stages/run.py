"""Owns the start of a run: its directory and who may write to it, its record, and all checks that need no hours.

Everything that can be known before work begins is checked here, so that nothing is lost to it later.
"""

import ctypes
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from specdist import provenance, tracking
from specdist.config import VOLATILE_KEYS, RecipeConfig
from specdist.dataset.prompts import load_prompts
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.gate_policy import GatePolicy, load_policy
from specdist.registry.store import Registry, check_writable
from specdist.schema import Prompt
from specdist.target import Target, open_target

logger = logging.getLogger(__name__)

RUN_FILE, PROVENANCE_FILE, LOCK_FILE = "run.yaml", "provenance.json", ".lock"


@dataclass
class Run:
    """One run of a recipe: its configuration, target, prompts, and where its artefacts lie."""

    config: RecipeConfig
    kind: str
    target: Target
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]
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
    def is_main(self) -> bool:
        return bool(self.state.is_main_process)

    @property
    def device(self) -> torch.device:
        return self.state.device

    def target_model(self, dtype_name: str) -> PreTrainedModel:
        """The target on this process's device, in "float32", "bfloat16" or "float16"."""
        return self.target.load_model(dtype_of(dtype_name), self.device, self.config.target.target_device_map)


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
    sys.exit(status)


def _lock(lock: FileLock, directory: Path) -> None:
    """Hold the run's directory until this process ends. Raises ArtifactError where another one does."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(
            f"{directory}: another process works in it; wait for it, stop it, or choose another --output_dir"
        ) from None


def _claim_directory(directory: Path, config: RecipeConfig, target: Target, kind: str) -> None:
    """Make the run's directory and its record, or check that the one there is of the same run.

    Raises ArtifactError where it belongs to another target or another configuration.
    """
    provenance.remove_leftovers(directory)
    record = {"kind": kind, "target": target.identity.to_json()}
    resolved = config.resolved()
    if (directory / RUN_FILE).exists():
        earlier = provenance.read_json(directory / PROVENANCE_FILE)
        if earlier["target"] != record["target"] or earlier["kind"] != kind:
            raise ArtifactError(
                f"{directory}: belongs to a {earlier['kind']} run for target {earlier['target']['model_id']} "
                f"(weights {earlier['target']['weights_sha256'][:12]}), this is {kind} for "
                f"{target.identity.model_id} (weights {target.identity.weights_sha256[:12]}); "
                "choose another --output_dir"
            )
        before = yaml.safe_load((directory / RUN_FILE).read_text(encoding="utf-8"))
        changed = [
            f"{key}: {before.get(key)!r} → {resolved.get(key)!r}"
            for key in sorted(before.keys() | resolved.keys())
            if key not in VOLATILE_KEYS and before.get(key) != resolved.get(key)
        ]
        if changed:
            raise ArtifactError(
                f"{directory}: holds a run with other settings ({'; '.join(changed)}); "
                "choose another --output_dir, or delete this one to start anew"
            )
        return
    if any(p.name not in (LOCK_FILE, PROVENANCE_FILE) for p in directory.iterdir()):
        raise ArtifactError(f"{directory}: is not empty and holds no {RUN_FILE}; choose another --output_dir")
    provenance.write_json(directory / PROVENANCE_FILE, {**record, **provenance.provenance()})
    provenance.write_text(directory / RUN_FILE, yaml.safe_dump(resolved, allow_unicode=True))


def weights_bytes(target: Target) -> int:
    """Size of the target's weights on disk."""
    return sum(file.stat().st_size for file in target.path.glob("*.safetensors"))


def _check_lengths(config: RecipeConfig, target: Target) -> None:
    data = config.data
    longest = data.max_prompt_tokens + max(data.train_max_new_tokens, data.eval_max_new_tokens)
    if target.context_length is not None and longest > target.context_length:
        raise ConfigError(
            f"max_prompt_tokens {data.max_prompt_tokens} + longest answer "
            f"{longest - data.max_prompt_tokens} = {longest} tokens, but {target.identity.model_id} reads "
            f"{target.context_length}; lower max_prompt_tokens or the max_new_tokens"
        )
    longest_row = getattr(config.training, "max_length", None)
    if longest_row is not None and longest_row < data.max_prompt_tokens + data.train_max_new_tokens:
        logger.info("max_length %d cuts rows longer than it; what is cut is counted", longest_row)


def _check_disk(directory: Path, needed: int) -> int:
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ArtifactError(
            f"{directory}: the run needs about {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free; "
            "free some, or choose another --output_dir"
        )
    return free


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _plan(run: Run, trained_bytes: int) -> None:
    """Log the plan with its costs; raise ArtifactError where disk or memory cannot hold it.

    `trained_bytes`: size of what is trained, in fp32.
    """
    data, steps = run.config.data, run.config.training
    rows = len(run.train_prompts) * len(data.train_temperatures)
    eval_rows = 2 * len(run.eval_prompts)
    hidden = getattr(run.target.config.get_text_config(), "hidden_size", 0)
    states = 4 * hidden * eval_rows * data.eval_max_new_tokens
    checkpoints = 4 if steps.save_strategy != "no" else 1
    disk = states + trained_bytes * (checkpoints + 2 + 2)
    free = _check_disk(run.directory, disk)
    parameters = weights_bytes(run.target) / 2
    element = dtype_of(run.config.target.eval_dtype).itemsize
    memory = int(parameters * element + trained_bytes * 4)  # weights, gradients and AdamW's two moments
    available = _memory_bytes(run.device) * (torch.cuda.device_count() if run.config.target.target_device_map else 1)
    if memory > available:
        raise ArtifactError(
            f"the run needs about {memory / 1e9:.1f} GB of memory on {run.device} and it has {available / 1e9:.1f} GB; "
            "set eval_dtype to bfloat16, or spread the target over more GPUs with target_device_map: auto"
        )
    logger.info(
        "plan  target    %s, %.0f M parameters, on %s", run.target.identity.model_id, parameters / 1e6, run.device
    )
    logger.info("plan  data      %d answers of up to %d tokens to train on", rows, data.train_max_new_tokens)
    logger.info("plan            %d answers of up to %d tokens to evaluate on", eval_rows, data.eval_max_new_tokens)
    logger.info(
        "plan  training  %g epochs, %d processes of %d threads",
        steps.num_train_epochs,
        run.state.num_processes,
        torch.get_num_threads(),
    )
    logger.info("plan  disk      about %.1f GB of %.1f GB free", disk / 1e9, free / 1e9)
    logger.info("plan  memory    about %.1f GB of %.1f GB", memory / 1e9, available / 1e9)
    champion = run.registry.champion()
    logger.info("plan  champion  %s", f"version {champion.number}" if champion else "none yet")


def _use_all_cores() -> None:
    """Share the cores that this process may use among the processes here; accelerate launch would leave one thread.

    SPECDIST_NUM_THREADS says otherwise.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(int(os.environ.get("SPECDIST_NUM_THREADS", share)))


def _keep_freed_memory() -> None:
    """Let glibc reuse freed memory; handing large tensors back at once costs a quarter of a step in page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: tensors below 1 GiB come from the heap,
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: which is not returned to the system after each


def start(config: RecipeConfig, kind: str, *, check: Callable[[Target], int]) -> Run | None:
    """Check everything that can be known, claim the run's directory, and log the plan. None after a dry run.

    `check` checks the recipe's own part against the target and returns the size in bytes of what will be trained.
    """
    state = PartialState()
    _use_all_cores()
    _keep_freed_memory()
    if not state.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    policy = load_policy(Path(config.release.gate_policy))
    train_prompts = load_prompts(Path(config.data.train_prompts), limit=config.data.max_train_prompts)
    eval_prompts = load_prompts(Path(config.data.eval_prompts), limit=config.data.max_eval_prompts)
    if shared := {p.id for p in train_prompts} & {p.id for p in eval_prompts}:
        raise ArtifactError(
            f"{len(shared)} prompts are in both {config.data.train_prompts} and {config.data.eval_prompts}, "
            f"for example {min(shared)}; evaluation needs prompts that were not trained on"
        )
    with state.main_process_first():
        target = open_target(config.target.target_model)
    _check_lengths(config, target)
    trained_bytes = check(target)
    directory = Path(config.training.output_dir)
    check_writable(Path(config.release.registry))
    registry = Registry(Path(config.release.registry), config.release.model_name)
    lock = FileLock(directory / LOCK_FILE)
    run = Run(config, kind, target, train_prompts, eval_prompts, policy, registry, state, lock)
    if config.release.dry_run:
        _plan(run, trained_bytes)
        logger.info("dry run: everything that can be checked now is in order; nothing was made")
        return None
    if state.is_main_process:
        _plan(run, trained_bytes)
        directory.mkdir(parents=True, exist_ok=True)
        _lock(lock, directory)
        _claim_directory(directory, config, target, kind)
    state.wait_for_everyone()
    tracking.prepare_wandb(_report_to(config.training), directory, config.release.model_name)
    return run


def _report_to(training: Any) -> list[str]:
    return [training.report_to] if isinstance(training.report_to, str) else list(training.report_to or [])
