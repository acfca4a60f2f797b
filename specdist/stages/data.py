"""Owns the data stage: the target's answers to train on, and its answers to evaluate on with its own states."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedModel

from specdist.dataset.distill import build_dataset, dataset_fingerprint, read_rows, training_examples
from specdist.dataset.prompts import prompts_sha256
from specdist.evaluation.acceptance import EvalSet, EvalText, add_target_features
from specdist.schema import DistillRow, Prompt, SamplingSpec
from specdist.stages.run import Run

logger = logging.getLogger(__name__)


@contextmanager
def _sole_writer(run: Run, directory: Path) -> Iterator[None]:
    """Let one run at a time work on a dataset: runs of one target share them, and may be started side by side."""
    lock = FileLock(directory.with_suffix(".lock"))
    if run.is_main:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    run.state.wait_for_everyone()
    try:
        yield
    finally:
        lock.release()


def _dataset(
    run: Run,
    prompts: list[Prompt],
    samplings: Sequence[SamplingSpec],
    dtype: str,
    load_model: Callable[[], PreTrainedModel],
) -> tuple[Path, list[DistillRow]]:
    data, target = run.config.data, run.target
    digest = prompts_sha256(prompts)
    fingerprint = dataset_fingerprint(
        target.identity,
        digest,
        samplings,
        max_prompt_tokens=data.max_prompt_tokens,
        batch_size=data.generation_batch_size,
        seed=data.generation_seed,
        dtype=dtype,
    )
    directory = Path(data.data_dir) / fingerprint
    with _sole_writer(run, directory):
        build_dataset(
            directory,
            prompts,
            digest,
            target.identity,
            target.tokenizer,
            load_model,
            list(samplings),
            max_prompt_tokens=data.max_prompt_tokens,
            batch_size=data.generation_batch_size,
            seed=data.generation_seed,
            dtype=dtype,
            rank=run.state.process_index,
            world_size=run.state.num_processes,
            barrier=run.state.wait_for_everyone,
        )
    manifest, rows = read_rows(directory)
    logger.info(
        "data  %s: %d answers, %d tokens, finished by %s, rejected %s",
        directory,
        manifest.num_rows,
        manifest.num_completion_tokens,
        manifest.finish_reasons,
        manifest.rejected or "none",
    )
    return directory, rows


def training_data(run: Run, *, max_length: int) -> tuple[Dataset, list[DistillRow]]:
    """The target's answers to the training prompts, as examples of token ids, and as rows."""
    dtype = run.config.target.target_dtype
    samplings = run.config.data.train_samplings()
    _, rows = _dataset(run, run.train_prompts, samplings, dtype, cache(lambda: run.target_model(dtype)))
    return training_examples(rows, max_length=max_length), rows


def evaluation_data(run: Run, *, need_states: bool) -> list[EvalSet]:
    """The target's answers to the evaluation prompts: greedy, and sampled as served.

    The target's log-probabilities go with sampled answers, its hidden states with all if `need_states`.
    """
    dtype = run.config.target.eval_dtype
    load_model = cache(lambda: run.target_model(dtype))  # loaded once, and only if something is missing
    sets = []
    for sampling in run.config.data.eval_samplings():
        directory, rows = _dataset(run, run.eval_prompts, [sampling], dtype, load_model)
        if not need_states and sampling.is_greedy:
            sets.append(EvalSet(sampling, [EvalText(row) for row in rows]))
            continue
        with _sole_writer(run, directory), run.state.main_process_first():
            sets.append(add_target_features(rows, sampling, load_model, directory / "target-states.safetensors"))
    return sets
