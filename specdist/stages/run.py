"""Owns the start of a run: its directory and who may write to it, its record, and all checks that need no hours.

Everything that can be known before work begins is checked here, so that nothing is lost to it later.
"""

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
from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.dataset.prompts import PromptSet
from specdist.drafter_config import HEAD_KINDS
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.gate_policy import GatePolicy, load_policy
from specdist.registry.store import Registry, check_writable
from specdist.stages.engines import server_engine
from specdist.stages.process import keep_freed_memory, use_all_cores
from specdist.target import Target, open_target

logger = logging.getLogger(__name__)

RUN_FILE, PROVENANCE_FILE, LOCK_FILE = "run.yaml", "provenance.json", ".lock"


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
    data, context = config.data, config.data.context_length or target.context_length
    answer = max(data.train_max_new_tokens, data.eval_max_new_tokens)
    if context is None:
        return
    if target.context_length is not None and context > target.context_length:
        raise ConfigError(
            f"context_length {context}: {target.identity.model_id} reads {target.context_length} tokens; lower it"
        )
    if answer >= context:
        raise ConfigError(
            f"an answer of {answer} tokens leaves no room for a prompt in a context of {context}; "
            "lower train_max_new_tokens and eval_max_new_tokens"
        )
    if data.max_prompt_tokens + answer > context:
        logger.info("prompts longer than %d tokens leave no room for an answer; they are counted", context - answer)


def _check_saves(training: Any) -> None:
    """Acceptance is measured on what was saved, so nothing saved on time is nothing measured."""
    strategy = str(getattr(training.save_strategy, "value", training.save_strategy))
    if strategy not in ("steps", "epoch"):
        raise ConfigError(
            f"save_strategy {strategy!r}: each checkpoint is measured as it is saved, so it must be steps or epoch; "
            "save_total_limit bounds how many stay on disk"
        )


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


def _avoid_float16(config: RecipeConfig) -> None:
    """CPUs compute in float16 slowly and overflow early: acceptance is measured in float32 there."""
    if config.target.eval_dtype == "float16":
        logger.warning("eval_dtype float16 on a CPU: acceptance is measured in float32 instead")
        config.target.eval_dtype = "float32"
    if config.target.target_dtype == "float16":
        logger.warning("target_dtype float16 on a CPU is slow and overflows early; bfloat16 or float32 is better")


def _states_bytes(run: Run, rows: int, eval_rows: int) -> int:
    """Most that the target's stored states can take: in fp32 to evaluate, in its own dtype to learn from."""
    data, objective = run.config.data, run.config.objective
    learned = run.kind in HEAD_KINDS or (objective.needs_target and objective.target_distribution == "full")
    hidden = getattr(run.target.config.get_text_config(), "hidden_size", 0)
    targets = 2 if getattr(run.config.model, "changes_target", False) else 1  # the changed one writes texts of its own
    states = 4 * hidden * eval_rows * data.eval_max_new_tokens * targets
    if learned and objective.cache_target_states:
        states += dtype_of(run.config.target.target_dtype).itemsize * hidden * rows * data.train_max_new_tokens
    return states


def _plan(run: Run, trained_bytes: int) -> None:
    """Log the plan with its costs; raise ArtifactError where disk or memory cannot hold it.

    `trained_bytes`: size of what is trained, in fp32.
    """
    data, steps = run.config.data, run.config.training
    rows = 0 if data.train_dataset else len(run.train_prompts) * len(data.train_temperatures)
    # an id of 4 bytes and a log-probability of 2 for each of the best tokens, the tail's mass of 4
    best = rows * data.train_max_new_tokens * (6 * data.top_logprobs + 4) if data.top_logprobs else 0
    eval_rows = 2 * len(run.eval_prompts)
    states = _states_bytes(run, rows, eval_rows)
    checkpoints = max(2, steps.save_total_limit or 4)
    disk = states + best + trained_bytes * (checkpoints + 4 + 2)  # two have AdamW's moments
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
    if best:
        logger.info("plan            with the %d best tokens at each, up to %.1f GB", data.top_logprobs, best / 1e9)
    logger.info("plan            %d answers of up to %d tokens to evaluate on", eval_rows, data.eval_max_new_tokens)
    logger.info("plan  objective %s", " + ".join(run.config.objective.objective))
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


def _prompts(config: RecipeConfig, state: PartialState) -> tuple[PromptSet, PromptSet]:
    """The prompts of both sides, made by the main process where they are not there yet."""
    asked = config.prompts
    with state.main_process_first():
        return prepare_prompts(
            PromptMix(asked.train_prompts, asked.train_prompt_weights, asked.max_train_prompts),
            PromptMix(asked.eval_prompts, limit=asked.max_eval_prompts),
            directory=Path(config.data.data_dir) / "prompts",
            policy=asked.policy(),
            near_duplicate_threshold=asked.near_duplicate_threshold,
            eval_fraction=asked.eval_fraction,
        )


def start(
    config: RecipeConfig,
    kind: str,
    *,
    check: Callable[[Target], int],
    preview: Callable[[Target], list[str]] = lambda target: [],
) -> Run | None:
    """Check everything that can be known, claim the run's directory, and log the plan. None after a dry run.

    `check` checks the recipe's own part against the target and returns the size in bytes of what will be trained;
    `preview` gives lines that a dry run says beside the plan.
    """
    state = PartialState()
    use_all_cores()
    keep_freed_memory()
    if not state.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    if config.data.engine == "vllm" and state.num_processes > 1:
        raise ConfigError(
            f"engine vllm in {state.num_processes} processes: each would open its own on the same GPU; launch one "
            "process and set tensor_parallel_size, or serve the target and use the engine server"
        )
    policy = load_policy(Path(config.release.gate_policy))
    if state.device.type == "cpu":
        _avoid_float16(config)
    with state.main_process_first():
        target = open_target(config.target.target_model)
    _check_lengths(config, target)
    _check_saves(config.training)
    trained_bytes = check(target)
    directory = Path(config.training.output_dir)
    check_writable(Path(config.release.registry))
    registry = Registry(Path(config.release.registry), config.release.model_name)
    lock = FileLock(directory / LOCK_FILE)
    train_prompts, eval_prompts = _prompts(config, state)
    run = Run(config, kind, target, train_prompts, eval_prompts, policy, registry, state, lock)
    if config.release.dry_run:
        _plan(run, trained_bytes)
        if config.data.engine == "server":
            server_engine(config, target)
        for line in preview(target) if state.is_main_process else []:
            logger.info("%s", line)
        logger.info(
            "dry run: everything that can be checked now is in order; of the run nothing was made, "
            "its prompts are ready in %s",
            train_prompts.path.parent,
        )
        return None
    if state.is_main_process:
        _plan(run, trained_bytes)
        directory.mkdir(parents=True, exist_ok=True)
        _lock(lock, directory)
        _claim_directory(directory, config, target, kind)
    state.wait_for_everyone()
    tracking.prepare_wandb(report_to(config.training), directory, config.release.model_name)
    return run


def report_to(training: Any) -> list[str]:
    """The names of the trackers that the trainer reports to."""
    return [training.report_to] if isinstance(training.report_to, str) else list(training.report_to or [])
