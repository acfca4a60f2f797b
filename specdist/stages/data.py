"""Owns the data stage: the target's answers to train on, and its answers to evaluate on with its own states."""

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from datasets import Dataset
from filelock import FileLock

from specdist.dataset.distill import build_dataset
from specdist.dataset.examples import training_examples
from specdist.dataset.manifest import (
    GIVEN_ENGINE,
    check_target,
    dataset_fingerprint,
    read_manifest,
    read_rows,
    texts_sha256,
)
from specdist.dataset.prompts import PromptSet
from specdist.dataset.render import Renderer
from specdist.evaluation.acceptance import EvalSet, EvalText, add_target_features
from specdist.generation.engine import Engine
from specdist.schema import DatasetInputs, DatasetManifest, SamplingSpec
from specdist.stages.engines import embedded_engine, training_engine
from specdist.stages.run import Run

logger = logging.getLogger(__name__)

_EMBEDDED = "transformers"


@contextmanager
def sole_writer(run: Run, directory: Path) -> Iterator[None]:
    """Let one run at a time work in a directory: runs of one target share datasets, and may be started side by side.

    All processes of a run call this; the lock lies beside the directory. Where nobody may write, as in a dataset that
    is shared for reading, there is none.
    """
    lock = FileLock(directory.with_suffix(".lock"))
    if run.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS) or not directory.is_dir():
                raise
    run.state.wait_for_everyone()
    try:
        yield
    finally:
        lock.release()


def _inputs(
    run: Run,
    prompts: PromptSet,
    samplings: list[SamplingSpec],
    *,
    engine: str = _EMBEDDED,
    dtype: str,
    num_top_logprobs: int = 0,
) -> DatasetInputs:
    data = run.config.data
    return DatasetInputs(
        target=run.target.identity,
        prompts_sha256=prompts.sha256,
        chat_format=data.chat_format(),
        samplings=samplings,
        max_prompt_tokens=data.max_prompt_tokens,
        context_length=run.context_length,
        engine=engine,
        dtype=dtype,
        seed=data.generation_seed,
        num_top_logprobs=num_top_logprobs,
    )


def _training_inputs(run: Run) -> DatasetInputs:
    data, dtype = run.config.data, run.config.target.target_dtype
    samplings, top = data.train_samplings(), data.top_logprobs
    return _inputs(run, run.train_prompts, samplings, engine=data.engine, dtype=dtype, num_top_logprobs=top)


def _evaluation_inputs(run: Run, sampling: SamplingSpec) -> DatasetInputs:
    return _inputs(run, run.eval_prompts, [sampling], dtype=run.config.target.eval_dtype)


def training_directory(run: Run) -> Path:
    """Where the answers to train on lie, or will."""
    data = run.config.data
    return Path(data.train_dataset or Path(data.data_dir) / dataset_fingerprint(_training_inputs(run)))


def evaluation_directory(run: Run, sampling: SamplingSpec) -> Path:
    """Where the answers to evaluate on under `sampling` lie, or will."""
    return Path(run.config.data.data_dir) / dataset_fingerprint(_evaluation_inputs(run, sampling))


def _build(
    run: Run, directory: Path, inputs: DatasetInputs, prompts: PromptSet, make_engine: Callable[[], Engine]
) -> DatasetManifest:
    with sole_writer(run, directory):
        manifest = build_dataset(
            directory,
            inputs,
            prompts,
            Renderer(run.target.tokenizer, inputs.chat_format),
            make_engine,
            shard_rows=run.config.data.shard_rows,
            rank=run.state.process_index,
            world_size=run.state.num_processes,
            barrier=run.state.wait_for_everyone,
        )
    _report(directory, manifest)
    return manifest


def _report(directory: Path, manifest: DatasetManifest) -> None:
    logger.info(
        "data  %s: %d answers, %d tokens, finished by %s, left out %s",
        directory,
        manifest.num_rows,
        manifest.num_completion_tokens,
        manifest.finish_reasons,
        manifest.rejected or "none",
    )


@dataclass(frozen=True)
class TrainingData:
    """A finished dataset, and its rows as examples of token ids."""

    directory: Path
    manifest: DatasetManifest
    examples: Dataset


def training_data(run: Run, *, max_length: int) -> TrainingData:
    """The target's answers to the training prompts.

    Raises ArtifactError where `train_dataset` names a dataset that another target or chat format made.
    """
    data, directory = run.config.data, training_directory(run)
    if data.train_dataset:
        manifest = read_manifest(directory)
        check_target(directory, manifest, run.target.identity, data.chat_format())
        if manifest.inputs.engine == GIVEN_ENGINE:
            logger.warning(
                "%s: the target did not write these answers; a draft that learns from them is accepted far less often, "
                "so let the target answer the prompts instead (leave out train_dataset)",
                directory,
            )
        _report(directory, manifest)
    else:
        dtype = run.config.target.target_dtype
        manifest = _build(
            run,
            directory,
            _training_inputs(run),
            run.train_prompts,
            lambda: training_engine(run.config, run.target, run.context_length, lambda: run.target_model(dtype)),
        )
    if (share := manifest.num_truncated / manifest.num_rows) > data.max_truncated_share:
        logger.warning(
            "%.0f %% of the answers are cut off by train_max_new_tokens, more than max_truncated_share %.0f %%: the "
            "drafter sees few endings; raise train_max_new_tokens for a serving drafter",
            100 * share,
            100 * data.max_truncated_share,
        )
    with run.state.main_process_first():
        top = run.config.objective.needs_target and run.config.objective.target_distribution == "top"
        return TrainingData(directory, manifest, training_examples(directory, max_length=max_length, top=top))


def evaluation_data(run: Run, *, need_states: bool, samplings: Sequence[SamplingSpec] | None = None) -> list[EvalSet]:
    """The target's answers to the evaluation prompts: greedy, and sampled as served, or as `samplings` say.

    The target's log-probabilities go with sampled answers, its hidden states with all if `need_states`. The embedded
    engine writes them, since replay is certified by the same model in the same dtype.
    """
    dtype = run.config.target.eval_dtype
    load_model = cache(lambda: run.target_model(dtype))  # loaded once, and only if something is missing
    sets = []
    for sampling in run.config.data.eval_samplings() if samplings is None else samplings:
        directory = evaluation_directory(run, sampling)
        _build(
            run,
            directory,
            _evaluation_inputs(run, sampling),
            run.eval_prompts,
            lambda: embedded_engine(run.config, run.target, load_model),
        )
        manifest, rows = read_rows(directory)
        if not need_states and sampling.is_greedy:
            texts = [EvalText(row) for row in rows]
        else:
            with sole_writer(run, directory), run.state.main_process_first():
                states = directory / "target-states.safetensors"
                texts = add_target_features(rows, sampling, load_model, states).texts
        sets.append(EvalSet(sampling, texts, texts_sha256(manifest.inputs)))
    return sets
