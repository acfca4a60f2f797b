"""Owns the DistillDataset: the target's own answers as token ids in Parquet shards, resumable, and training examples.

A row's id is a hash of prompt, sample index, sampling and seed, and seeds its random numbers. Rows are cut into fixed
units, one shard each, so any number of processes can finish what another number began. The manifest comes last: where
it exists, the dataset is complete. No text is ever tokenised again: training sees the ids that were generated.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdist.dataset.shards import read_shard, shard_path, write_shard
from specdist.errors import ArtifactError, ConfigError
from specdist.generation.hf import PromptRejected, check_positions, encode_prompt, generate
from specdist.progress import INTERVAL_SECONDS, format_seconds
from specdist.provenance import read_json, remove_leftovers, sha256_file, sha256_json, write_json
from specdist.schema import SCHEMA_VERSION, DatasetManifest, DistillRow, Prompt, SamplingSpec, TargetIdentity

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a position without supervision, torch's cross entropy's default


@dataclass(frozen=True)
class _Task:
    """One answer to be written."""

    id: str
    prompt: Prompt
    prompt_ids: list[int]
    sample_index: int
    sampling: SamplingSpec

    @property
    def seed(self) -> int:
        """60 bits of the id: fits a signed 64-bit column."""
        return int(self.id[:15], 16)


def _inputs(
    target: TargetIdentity,
    prompts_sha256: str,
    samplings: Sequence[SamplingSpec],
    max_prompt_tokens: int,
    dtype: str,
    engine_settings: str,
) -> dict[str, Any]:
    """What determines the content of a dataset, by name."""
    return {
        "weights_sha256": target.weights_sha256,
        "tokenizer_sha256": target.tokenizer_sha256,
        "chat_template_sha256": target.chat_template_sha256,
        "eos_token_ids": sorted(target.eos_token_ids),
        "prompts_sha256": prompts_sha256,
        "samplings": [asdict(s) for s in samplings],
        "max_prompt_tokens": max_prompt_tokens,
        "dtype": dtype,
        "engine": engine_settings,
    }


def _engine_settings(batch_size: int, seed: int) -> str:
    """The part of a manifest's `engine` after the engine's version, which another version need not repeat.

    The batch size is in it because in bf16 the batch around a row can flip a near-tie.
    """
    return f"batch_size {batch_size}, seed {seed}"


def _fingerprint(inputs: dict[str, Any]) -> str:
    return sha256_json({"schema_version": SCHEMA_VERSION, **inputs})[:12]


def dataset_fingerprint(
    target_identity: TargetIdentity,
    prompts_sha256: str,
    samplings: Sequence[SamplingSpec],
    *,
    max_prompt_tokens: int,
    batch_size: int,
    seed: int,
    dtype: str,
) -> str:
    """12 hex digits over all that determines a dataset's content; the name of its directory."""
    settings = _engine_settings(batch_size, seed)
    inputs = _inputs(target_identity, prompts_sha256, samplings, max_prompt_tokens, dtype, settings)
    return _fingerprint(inputs)


def build_dataset(
    directory: Path,
    prompts: list[Prompt],
    prompts_sha256: str,
    target_identity: TargetIdentity,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    samplings: list[SamplingSpec],
    *,
    max_prompt_tokens: int,
    batch_size: int,
    seed: int,
    dtype: str,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> DatasetManifest:
    """Let the target answer every prompt under every sampling; continue what an earlier run left; return the manifest.

    A finished dataset made from the same inputs is returned without loading the model. All `world_size` processes call
    this with the same arguments but `rank`, and meet at `barrier`. Prompts that are too long or that cannot be encoded
    are counted in the manifest's `rejected`.
    Raises ArtifactError where the directory holds a dataset made from other inputs, or where no prompt is usable.
    """
    settings = _engine_settings(batch_size, seed)
    inputs = _inputs(target_identity, prompts_sha256, samplings, max_prompt_tokens, dtype, settings)
    if (directory / "manifest.json").exists():
        manifest = _read_manifest(directory)
        _check_inputs(directory, manifest, inputs)
        return manifest
    if not samplings or batch_size < 1:
        raise ConfigError(f"{len(samplings)} samplings, batch_size {batch_size}: expected at least 1 of each")
    fingerprint = _fingerprint(inputs)
    tasks, rejected = _plan(prompts, tokenizer, samplings, max_prompt_tokens, seed)
    units = _units(tasks, batch_size)
    if rank == 0:
        remove_leftovers(directory)
    barrier()

    mine = range(rank, len(units), world_size)
    if pending := [k for k in mine if _complete_rows(directory, k, units[k], fingerprint) is None]:
        model = load_model()
        check_positions(model, max(len(t.prompt_ids) + t.sampling.max_new_tokens for t in tasks))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else target_identity.eos_token_ids[0]
        progress = _Progress(sum(len(units[k]) for k in pending), enabled=rank == 0)
        for k in pending:
            rows = _answer(model, units[k], target_identity.eos_token_ids, pad)
            write_shard(shard_path(directory, k), rows, fingerprint)
            progress.update(rows)
    barrier()

    if rank == 0:
        engine = f"transformers {transformers.__version__}, {settings}"
        shards = _finished_shards(directory, units, fingerprint)
        manifest = _manifest(directory, target_identity, samplings, inputs, engine, shards, rejected)
        write_json(directory / "manifest.json", manifest.to_json())
    barrier()
    return _read_manifest(directory)


def _plan(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    samplings: list[SamplingSpec],
    max_prompt_tokens: int,
    seed: int,
) -> tuple[list[_Task], Counter[str]]:
    """Every answer to be written, and how many prompts were rejected by reason."""
    tasks: list[_Task] = []
    rejected: Counter[str] = Counter()
    for prompt in prompts:
        try:
            ids = encode_prompt(tokenizer, prompt.messages)
            if len(ids) > max_prompt_tokens:
                raise PromptRejected("too_long", f"{len(ids)} tokens, more than max_prompt_tokens {max_prompt_tokens}")
        except PromptRejected as error:
            rejected[error.reason] += 1
            logger.info("prompt %s is left out: %s", prompt.id, error)
            continue
        for index, sampling in enumerate(samplings):
            row_id = sha256_json([prompt.id, index, asdict(sampling), seed])[:16]
            tasks.append(_Task(row_id, prompt, ids, index, sampling))
    if not tasks:
        raise ArtifactError(f"no prompt is left of {len(prompts)}; rejected by reason: {dict(rejected)}")
    if rejected:
        logger.warning("left out %d of %d prompts, by reason: %s", rejected.total(), len(prompts), dict(rejected))
    return tasks, rejected


def _units(tasks: list[_Task], batch_size: int) -> list[list[_Task]]:
    """Batches of one sampling and similar length. Longest first: if memory does not suffice, it shows at once."""
    ordered = sorted(tasks, key=lambda t: (t.sample_index, -len(t.prompt_ids), t.id))
    units: list[list[_Task]] = []
    for task in ordered:
        if not units or len(units[-1]) == batch_size or units[-1][0].sample_index != task.sample_index:
            units.append([])
        units[-1].append(task)
    return units


def _answer(model: PreTrainedModel, unit: list[_Task], eos_token_ids: list[int], pad: int) -> list[DistillRow]:
    answers = generate(
        model, [t.prompt_ids for t in unit], unit[0].sampling, [t.seed for t in unit], eos_token_ids, pad
    )
    return [
        DistillRow(
            id=task.id,
            prompt_id=task.prompt.id,
            sample_index=task.sample_index,
            domain=task.prompt.domain,
            prompt_ids=task.prompt_ids,
            completion_ids=ids,
            finish_reason=reason,
            sampling=task.sampling,
            seed=task.seed,
        )
        for task, (ids, reason) in zip(unit, answers, strict=True)
    ]


class _Progress:
    """Logs this process's rate and the time left, about every ten seconds."""

    def __init__(self, num_rows: int, *, enabled: bool) -> None:
        self.num_rows, self.enabled = num_rows, enabled
        self.rows = self.tokens = 0
        self.start = self.logged = time.monotonic()

    def update(self, rows: list[DistillRow]) -> None:
        self.rows += len(rows)
        self.tokens += sum(len(row.completion_ids) for row in rows)
        now = time.monotonic()
        if not self.enabled or (now - self.logged < INTERVAL_SECONDS and self.rows < self.num_rows):
            return
        self.logged = now
        seconds = now - self.start
        rate = self.tokens / max(seconds, 1e-9)
        left = format_seconds(seconds / self.rows * (self.num_rows - self.rows))
        logger.info("target's answers: %d/%d, %.0f tokens/s, %s left", self.rows, self.num_rows, rate, left)


def _complete_rows(directory: Path, unit: int, tasks: list[_Task], fingerprint: str) -> list[DistillRow] | None:
    """Rows of a unit whose shard exists, is whole and holds what it should; None where it must be written.

    Raises ArtifactError on a shard made from other inputs.
    """
    path = shard_path(directory, unit)
    if not path.exists():
        return None
    try:
        found, rows = read_shard(path)
    except ArtifactError as error:
        logger.warning("writing a shard again: %s", error)
        return None
    if found != fingerprint:
        raise ArtifactError(
            f"{path}: made from other inputs (fingerprint {found or 'none'}, now {fingerprint}); "
            "delete the unfinished dataset or choose another directory"
        )
    return rows if [row.id for row in rows] == [task.id for task in tasks] else None


def _finished_shards(directory: Path, units: list[list[_Task]], fingerprint: str) -> dict[str, list[DistillRow]]:
    """Rows of every shard by file name. Raises ArtifactError naming those that are not complete."""
    shards = {shard_path(directory, k).name: _complete_rows(directory, k, u, fingerprint) for k, u in enumerate(units)}
    if broken := [name for name, rows in shards.items() if rows is None]:
        raise ArtifactError(f"{directory}: {len(broken)} shards are not complete ({broken[:5]}); run again to finish")
    return {name: rows for name, rows in shards.items() if rows is not None}


def _manifest(
    directory: Path,
    target: TargetIdentity,
    samplings: list[SamplingSpec],
    inputs: dict[str, Any],
    engine: str,
    shards: dict[str, list[DistillRow]],
    rejected: Counter[str],
) -> DatasetManifest:
    rows = [row for members in shards.values() for row in members]
    return DatasetManifest(
        target=target,
        prompts_sha256=inputs["prompts_sha256"],
        samplings=samplings,
        max_prompt_tokens=inputs["max_prompt_tokens"],
        dtype=inputs["dtype"],
        engine=engine,
        num_prompts=len({row.prompt_id for row in rows}),
        num_rows=len(rows),
        num_prompt_tokens=sum(len(row.prompt_ids) for row in rows),
        num_completion_tokens=sum(len(row.completion_ids) for row in rows),
        rejected=dict(rejected),
        finish_reasons=dict(Counter(row.finish_reason for row in rows)),
        domains=dict(Counter(row.domain for row in rows)),
        shards={name: sha256_file(directory / name) for name in shards},
    )


def _read_manifest(directory: Path) -> DatasetManifest:
    path = directory / "manifest.json"
    return DatasetManifest.from_json(read_json(path), str(path))


def _check_inputs(directory: Path, manifest: DatasetManifest, inputs: dict[str, Any]) -> None:
    m = manifest
    settings = m.engine.partition(", ")[2]
    found = _inputs(m.target, m.prompts_sha256, m.samplings, m.max_prompt_tokens, m.dtype, settings)
    if differences := [f"{key}: {found[key]} there, {inputs[key]} now" for key in inputs if found[key] != inputs[key]]:
        raise ArtifactError(
            f"{directory / 'manifest.json'}: made from other inputs ({'; '.join(differences)}); "
            "use another directory, or delete this one"
        )


def read_rows(directory: Path) -> tuple[DatasetManifest, list[DistillRow]]:
    """Manifest and rows of a finished dataset, in the order of their ids: the same for any batch or process count.

    Raises ArtifactError where the dataset is not finished or a shard's SHA-256 is not the manifest's.
    """
    manifest = _read_manifest(directory)
    rows: list[DistillRow] = []
    for name, expected in manifest.shards.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path}: no such file, the manifest lists it; delete the dataset and make it again")
        if (got := sha256_file(path)) != expected:
            raise ArtifactError(f"{path}: SHA-256 {got}, manifest {expected}; delete the dataset and make it again")
        rows += read_shard(path)[1]
    return manifest, sorted(rows, key=lambda row: row.id)


def training_examples(rows: Sequence[DistillRow], *, max_length: int) -> Dataset:
    """Rows as `input_ids`, `labels` (-100 on the prompt) and `prompt_length`, cut at the right to `max_length`.

    Every completion token is supervised, its EOS where one was generated and nothing else; masks come from positions,
    never from values. Rows of which no completion token remains are dropped and counted in the log.
    Raises ArtifactError where no supervised token is left.
    """
    kept = [row for row in rows if len(row.prompt_ids) < max_length and row.completion_ids]
    if not kept:
        raise ArtifactError(
            f"0 supervised tokens: none of {len(rows)} rows has a prompt under max_length {max_length}; "
            "raise max_length or lower max_prompt_tokens"
        )
    if dropped := len(rows) - len(kept):
        logger.warning("dropped %d of %d rows: prompt of max_length %d or more", dropped, len(rows), max_length)
    return Dataset.from_dict(
        {
            "input_ids": [(row.prompt_ids + row.completion_ids)[:max_length] for row in kept],
            "labels": [([IGNORED] * len(row.prompt_ids) + row.completion_ids)[:max_length] for row in kept],
            "prompt_length": [len(row.prompt_ids) for row in kept],
        }
    )
