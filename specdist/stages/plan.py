"""Owns the plan of a run: the disk and memory it needs beyond what lies there already, and whether that is free.

A run that was killed starts again, so what it wrote before must not be asked for a second time.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdist.dataset.manifest import MANIFEST_FILE, read_manifest
from specdist.drafter_config import HEAD_KINDS, TrainedSize
from specdist.errors import ArtifactError
from specdist.stages.data import evaluation_directory, training_directory
from specdist.stages.evidence import GATE_FILE
from specdist.stages.run import Run, dtype_of
from specdist.stages.train import DONE_FILE
from specdist.target import Target

logger = logging.getLogger(__name__)


def fsdp_version(training: Any) -> int:
    """Which FSDP shards what is trained, by the launcher or the trainer's arguments; 0: none."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return int(os.environ.get("FSDP_VERSION", "1"))
    return int((getattr(training, "fsdp_plugin_args", None) or {}).get("fsdp_version", 0))


def zero_stage(training: Any) -> int:
    """Which stage of DeepSpeed's ZeRO shards what is trained, by the launcher or the trainer's arguments; 0: none."""
    plugin = getattr(training, "deepspeed_plugin", None)
    return int(plugin.zero_stage) if plugin else 0


def _is_trained(run: Run) -> bool:
    return (run.checkpoints / DONE_FILE).exists()


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _dataset_bytes(directory: Path, *, tokens: int, text: int, state: int) -> int:
    """Most that is still to be written of a dataset of up to so many tokens, at so many bytes of each."""
    finished = (directory / MANIFEST_FILE).exists()
    if finished:
        tokens, text = read_manifest(directory).num_completion_tokens, 0
    texts = max(0, tokens * text - _size(directory.glob("*.parquet")))
    return texts + max(0, tokens * state - _size(directory.rglob("*.safetensors")))


def _training_tokens(run: Run) -> int:
    data = run.config.data
    rows = 0 if data.train_dataset else len(run.train_prompts) * len(data.train_temperatures)
    return rows * data.train_max_new_tokens


def _best_tokens_bytes(run: Run) -> int:
    """At each token: an id of 4 bytes and a log-probability of 2 for each of the best, the tail's mass of 4."""
    best = run.config.data.top_logprobs
    return 6 * best + 4 if best else 0


def _data_needs(run: Run) -> dict[Path, int]:
    """Bytes still to be written, by dataset: best tokens, and the target's states in its dtype to learn from, in fp32
    to evaluate on."""
    data, objective = run.config.data, run.config.objective
    hidden = getattr(run.target.config.get_text_config(), "hidden_size", 0)
    learned = run.kind in HEAD_KINDS or (objective.needs_target and objective.target_distribution == "full")
    stored = learned and objective.cache_target_states and not _is_trained(run)
    state = dtype_of(run.config.target.target_dtype).itemsize * hidden if stored else 0
    needs = {
        training_directory(run): _dataset_bytes(
            training_directory(run), tokens=_training_tokens(run), text=_best_tokens_bytes(run), state=state
        )
    }
    for sampling in data.eval_samplings():
        directory, tokens = evaluation_directory(run, sampling), len(run.eval_prompts) * data.eval_max_new_tokens
        kept = run.kind in HEAD_KINDS or not sampling.is_greedy
        needs[directory] = _dataset_bytes(directory, tokens=tokens, text=0, state=4 * (hidden + 1) if kept else 0)
    return needs


def _run_bytes(run: Run, trained: TrainedSize) -> int:
    """Most that is still to be written in the run's directory: initial model, checkpoints with AdamW's moments in
    the two newest, export, and the texts of a target that learns as well."""
    if _is_trained(run):
        return 0 if run.export.exists() else 4 * trained.total
    kept, moments, copies = max(2, run.config.training.save_total_limit or 4), 4, 2
    needed = 4 * (trained.learned * (kept + moments) + trained.total * copies)
    if getattr(run.config.model, "changes_target", False):
        hidden = run.target.config.get_text_config().hidden_size
        needed += 4 * hidden * 2 * len(run.eval_prompts) * run.config.data.eval_max_new_tokens
    return max(0, needed - _size(run.directory.rglob("*")))


def _disk_needs(run: Run, trained: TrainedSize) -> dict[Path, int]:
    judged = (run.directory / GATE_FILE).exists()
    return {
        run.directory: _run_bytes(run, trained),
        run.registry.root: 0 if judged else 4 * trained.total,
        **_data_needs(run),
    }


def _check_disks(needs: dict[Path, int]) -> None:
    """Log what is needed of each disk. Raises ArtifactError where it is not free there."""
    disks: dict[int, list[Path]] = {}
    existing = {d: next(p for p in (d, *d.absolute().parents) if p.exists()) for d in needs}
    for directory in needs:
        disks.setdefault(existing[directory].stat().st_dev, []).append(directory)
    for directories in disks.values():
        needed = sum(needs[directory] for directory in directories)
        free = shutil.disk_usage(existing[directories[0]]).free
        logger.info(
            "plan  disk      about %.1f GB more of %.1f GB free, at %s", needed / 1e9, free / 1e9, directories[0]
        )
        if free < needed:
            parts = ", ".join(f"{d} {needs[d] / 1e9:.1f}" for d in directories if needs[d])
            raise ArtifactError(
                f"the run needs about {needed / 1e9:.1f} GB of disk more ({parts}) and {free / 1e9:.1f} GB are free; "
                "free some, choose another --output_dir, --data_dir or --registry, lower save_total_limit, or set "
                "cache_target_states: false"
            )


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _target_parameters(target: Target) -> int:
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(target.config).num_parameters())


def training_bytes(run: Run, trained: TrainedSize) -> int:
    """What training holds in memory on each device, activations apart: weights, fp32 gradients, AdamW's two moments."""
    learning = 12 * trained.learned
    if fsdp_version(run.config.training):
        return (trained.held_bytes + learning) // run.state.num_processes
    if zero_stage(run.config.training) == 2:
        learning //= run.state.num_processes
    return trained.held_bytes + learning


def _check_memory(run: Run, trained: TrainedSize, target_parameters: int) -> None:
    """Log what a device must hold. Raises ArtifactError where it cannot."""
    asked = run.config.target
    target = target_parameters * dtype_of(asked.eval_dtype).itemsize
    training = training_bytes(run, trained)
    available = _device_bytes(run.device) * (torch.cuda.device_count() if asked.target_device_map else 1)
    parts = f"target {target / 1e9:.1f}, training {training / 1e9:.1f}"
    if target + training > available:
        raise ArtifactError(
            f"the run needs about {(target + training) / 1e9:.1f} GB of memory on {run.device} ({parts}) and it has "
            f"{available / 1e9:.1f} GB; for the target set eval_dtype to bfloat16, or spread it over more GPUs with "
            "target_device_map: auto; for training set lora_rank, or launch with accelerate_configs/fsdp.yaml"
        )
    logger.info("plan  memory    about %.1f GB of %.1f GB (%s)", (target + training) / 1e9, available / 1e9, parts)


def log_plan(run: Run, trained: TrainedSize) -> None:
    """Log the plan with its costs; raise ArtifactError where disk or memory cannot hold it."""
    data, steps = run.config.data, run.config.training
    parameters, tokens = _target_parameters(run.target), _training_tokens(run)
    name, best = run.target.identity.model_id, tokens * _best_tokens_bytes(run)
    logger.info("plan  target    %s, %.0f M parameters, on %s", name, parameters / 1e6, run.device)
    answers = tokens // data.train_max_new_tokens
    logger.info("plan  data      %d answers of up to %d tokens to train on", answers, data.train_max_new_tokens)
    if best:
        logger.info("plan            with the %d best tokens at each, up to %.1f GB", data.top_logprobs, best / 1e9)
    answers = 2 * len(run.eval_prompts)
    logger.info("plan            %d answers of up to %d tokens to evaluate on", answers, data.eval_max_new_tokens)
    logger.info("plan  objective %s", " + ".join(run.config.objective.objective))
    threads = (run.state.num_processes, torch.get_num_threads())
    logger.info("plan  training  %g epochs, %d processes of %d threads", steps.num_train_epochs, *threads)
    _check_disks(_disk_needs(run, trained))
    _check_memory(run, trained, parameters)
    champion = run.registry.champion()
    logger.info("plan  champion  %s", f"version {champion.number}" if champion else "none yet")
