"""Owns the start of a run: its directory and who may write to it, its record, and all checks that need no hours.

Everything that can be known before work begins is checked here, so that nothing is lost to it later.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from filelock import FileLock, Timeout

from specdist import provenance, tracking
from specdist.config import VOLATILE_KEYS, RecipeConfig
from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.dataset.prompts import PromptSet
from specdist.drafter_config import TrainedSize
from specdist.errors import ArtifactError, ConfigError
from specdist.gate_policy import load_policy
from specdist.registry.mirror import check_uri, mirror_uri
from specdist.registry.place import check_writable
from specdist.registry.store import Registry
from specdist.schema import TargetIdentity
from specdist.stages.engines import server_engine
from specdist.stages.plan import fsdp_version, log_plan, zero_stage
from specdist.stages.process import check_num_processes, keep_freed_memory, use_all_cores
from specdist.stages.run import Run, report_to
from specdist.target import Target, open_target

logger = logging.getLogger(__name__)

RUN_FILE, PROVENANCE_FILE, LOCK_FILE = "run.yaml", "provenance.json", ".lock"


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
    resolved = config.resolved()
    if (directory / RUN_FILE).exists():
        earlier = provenance.read_json(directory / PROVENANCE_FILE)
        theirs = TargetIdentity.from_json(earlier["target"], str(directory / PROVENANCE_FILE))
        if theirs != target.identity or earlier["kind"] != kind:
            raise ArtifactError(
                f"{directory}: belongs to a {earlier['kind']} run for target {theirs.model_id} "
                f"(weights {theirs.weights_sha256[:12]}), this is {kind} for "
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
    record = {"kind": kind, "target": target.identity.to_json(), **provenance.provenance()}
    provenance.write_json(directory / PROVENANCE_FILE, record)
    provenance.write_text(directory / RUN_FILE, yaml.safe_dump(resolved, allow_unicode=True))


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


def _check_sharding(training: Any) -> None:
    """Distributions are formed outside the model's own forward, from all rows of its output projection."""
    if fsdp_version(training) == 1 or zero_stage(training) == 3:
        kind = "DeepSpeed ZeRO-3" if zero_stage(training) == 3 else "FSDP1"
        raise ConfigError(
            f"{kind} hides the rows of the output projection, which training reads; launch with "
            "accelerate_configs/fsdp.yaml (FSDP2) or ddp.yaml, or use ZeRO-2"
        )


def _avoid_float16(config: RecipeConfig) -> None:
    """CPUs compute in float16 slowly and overflow early: acceptance is measured in float32 there."""
    if config.target.eval_dtype == "float16":
        logger.warning("eval_dtype float16 on a CPU: acceptance is measured in float32 instead")
        config.target.eval_dtype = "float32"
    if config.target.target_dtype == "float16":
        logger.warning("target_dtype float16 on a CPU is slow and overflows early; bfloat16 or float32 is better")


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
    check: Callable[[Target], TrainedSize],
    preview: Callable[[Target], list[str]] = lambda target: [],
) -> Run | None:
    """Check everything that can be known, claim the run's directory, and log the plan. None after a dry run.

    `check` checks the recipe's own part against the target and returns the size of what will be trained;
    `preview` gives lines that a dry run says beside the plan.
    """
    state = PartialState()
    check_num_processes(state.num_processes)
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
    _check_sharding(config.training)
    trained = check(target)
    directory = Path(config.training.output_dir)
    check_writable(Path(config.release.registry))
    if (uri := mirror_uri(config.release.mlflow_tracking_uri)) is not None:
        check_uri(uri)
    registry = Registry(Path(config.release.registry), config.release.model_name)
    lock = FileLock(directory / LOCK_FILE)
    train_prompts, eval_prompts = _prompts(config, state)
    run = Run(config, kind, target, train_prompts, eval_prompts, policy, registry, state, lock)
    if config.release.dry_run:
        log_plan(run, trained)
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
        log_plan(run, trained)
        directory.mkdir(parents=True, exist_ok=True)
        _lock(lock, directory)
        _claim_directory(directory, config, target, kind)
    state.wait_for_everyone()
    tracking.prepare_wandb(report_to(config.training), directory, config.release.model_name)
    return run
