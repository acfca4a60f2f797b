"""Owns the DistillDataset: the target's own answers as token ids, written by any engine and any number of processes.

Rows are known by their ids, not by their place: a run that was killed, or had another number of processes, is continued
by asking for the rows that no shard holds. The manifest comes last: where it exists, the dataset is complete.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np

from specdist.dataset.manifest import (
    MANIFEST_FILE,
    check_inputs,
    dataset_fingerprint,
    make_manifest,
    read_manifest,
)
from specdist.dataset.plan import PLAN_FILE, Conversation, Limits, Plan, RowIds, row_seed, slots, write_plan
from specdist.dataset.render import PromptRejected, Renderer, history
from specdist.dataset.shards import Shard, shard_paths, write_shard
from specdist.dataset.throughput import Throughput
from specdist.errors import ArtifactError
from specdist.generation.engine import Answer, Engine, Request
from specdist.provenance import remove_leftovers, write_json
from specdist.schema import DatasetInputs, DatasetManifest, DistillRow, Prompt

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 60.0  # most that a killed process has to write again


class Prompts(Protocol):
    """A counted set of prompts that is read in a stream."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Prompt]: ...


def build_dataset(
    directory: Path,
    inputs: DatasetInputs,
    prompts: Prompts,
    renderer: Renderer,
    make_engine: Callable[[], Engine],
    *,
    shard_rows: int = 512,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> DatasetManifest:
    """Let the target answer every prompt under every sampling; continue what an earlier run left; return the manifest.

    A finished dataset made from the same inputs is returned without making the engine. All `world_size` processes call
    this with the same arguments but `rank`, and meet at `barrier`. What is left out is counted in the manifest.
    Raises ArtifactError where the directory holds a dataset made from other inputs, or where no prompt is usable.
    """
    if (directory / MANIFEST_FILE).exists():
        manifest = read_manifest(directory)
        check_inputs(directory, manifest, inputs)
        return manifest
    fingerprint = dataset_fingerprint(inputs)
    limits, row_ids = Limits(inputs), RowIds(inputs.samplings, inputs.seed)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        _remove_unusable_shards(directory, fingerprint)
        if not (directory / PLAN_FILE).exists():
            write_plan(directory / PLAN_FILE, prompts, len(prompts), renderer, limits)
    barrier()

    plan = Plan(directory / PLAN_FILE)
    pending = plan.pending(_ids(directory), inputs.samplings, row_ids)
    barrier()  # all have looked at what is written before one of them writes more: they share out the same rows
    speed = Throughput(directory, rank, world_size, num_units=len(pending))
    if len(mine := pending[rank::world_size]):
        work = _Work(plan, mine, inputs, renderer, limits, row_ids)
        with closing(make_engine()) as engine:
            _check_engine(engine, inputs)
            _write_rows(directory, work, engine, speed, shard_rows=shard_rows, fingerprint=fingerprint)
    barrier()

    if rank == 0:
        manifest = make_manifest(directory, inputs, plan, row_ids, tokens_per_second=speed.tokens_per_second())
        write_json(directory / MANIFEST_FILE, manifest.to_json())
        speed.remove_files()
    barrier()
    return read_manifest(directory)


def _check_engine(engine: Engine, inputs: DatasetInputs) -> None:
    if engine.context_length is not None and engine.context_length < inputs.context_length:
        raise ArtifactError(
            f"{engine.name}: reads {engine.context_length} tokens, the dataset's context_length is "
            f"{inputs.context_length}; lower context_length, or start the engine with a longer one"
        )


def _remove_unusable_shards(directory: Path, fingerprint: str) -> None:
    """Delete shards that are cut off or hold rows of another shard, so that their rows are written again.

    Raises ArtifactError on a shard made from other inputs.
    """
    seen: set[str] = set()
    for path in shard_paths(directory):
        try:
            shard = Shard(path)
            shard.verify()
            ids = shard.columns(["id"])["id"].to_pylist()
        except ArtifactError as error:
            logger.warning("its rows are written again: %s", error)
            path.unlink()
            continue
        if shard.fingerprint != fingerprint:
            raise ArtifactError(
                f"{path}: made from other inputs (fingerprint {shard.fingerprint or 'none'}, now {fingerprint}); "
                "delete the unfinished dataset or choose another directory"
            )
        if len(unique := set(ids)) < len(ids) or not seen.isdisjoint(unique):
            logger.warning("%s: holds rows that another shard holds; it is removed", path)
            path.unlink()
            continue
        seen |= unique


def _ids(directory: Path) -> set[str]:
    """Ids of all rows that were written."""
    return {row_id for path in shard_paths(directory) for row_id in Shard(path).columns(["id"])["id"].to_pylist()}


class _Work:
    """This process's units: gives requests to the engine, takes its answers, gives back conversations that are done."""

    def __init__(
        self,
        plan: Plan,
        units: np.ndarray,
        inputs: DatasetInputs,
        renderer: Renderer,
        limits: Limits,
        row_ids: RowIds,
    ) -> None:
        self.plan, self.renderer, self.limits, self.row_ids = plan, renderer, limits, row_ids
        self.slots = slots(inputs.samplings)
        self._units = iter(units.tolist())
        self._follow_ups: deque[Request] = deque()
        self._open: dict[str, tuple[Conversation, int, list[DistillRow]]] = {}  # by the key of the request

    def next_request(self) -> Request | None:
        """The next turn of a conversation that was begun, else the first of another."""
        if self._follow_ups:
            return self._follow_ups.popleft()
        if (unit := next(self._units, None)) is None:
            return None
        conversation = self.plan[unit[0]]
        return self._request(conversation, unit[1], [], conversation.prompt_ids)

    def _request(self, conversation: Conversation, slot: int, rows: list[DistillRow], ids: list[int]) -> Request:
        sampling, repeat = self.slots[slot]
        key = self.row_ids(conversation.prompt_id, len(rows), sampling, repeat)
        self._open[key] = (conversation, slot, rows)
        return Request(key, ids, sampling, row_seed(key))

    def take(self, answer: Answer) -> list[DistillRow]:
        """All rows of the conversation if this answer was its last, else none yet."""
        request = answer.request
        conversation, slot, rows = self._open.pop(request.key)
        rows.append(_row(answer, conversation, len(rows), self.slots[slot][1]))
        if len(rows) == conversation.num_turns or conversation.messages is None:
            return rows
        answers = [self.renderer.answer_text(row.completion_ids) for row in rows]
        try:
            ids = self.renderer.encode(history(conversation.messages, answers, len(rows)))
            self.limits.check(ids)
        except PromptRejected as error:
            logger.info("prompt %s ends after %d turns: %s", conversation.prompt_id, len(rows), error)
            return rows
        self._follow_ups.append(self._request(conversation, slot, rows, ids))
        return []


def _row(answer: Answer, conversation: Conversation, turn: int, sample_index: int) -> DistillRow:
    request, top = answer.request, answer.top
    best = np.asarray([] if top is None else top.logprobs, dtype=np.float16)  # [n, K], as they are stored
    return DistillRow(
        id=request.key,
        prompt_id=conversation.prompt_id,
        turn=turn,
        sample_index=sample_index,
        domain=conversation.domain,
        prompt_ids=request.prompt_ids,
        completion_ids=answer.completion_ids,
        finish_reason=answer.finish_reason,
        sampling=request.sampling,
        seed=request.seed,
        top_ids=None if top is None else [token for step in top.ids for token in step],
        top_logprobs=None if top is None else best.ravel().tolist(),
        # Rounding can bring the best tokens' mass above one
        tail_mass=None if top is None else (1.0 - np.exp(best.astype(np.float64)).sum(axis=1)).clip(0.0).tolist(),
    )


def _write_rows(
    directory: Path, work: _Work, engine: Engine, speed: Throughput, *, shard_rows: int, fingerprint: str
) -> None:
    """Write shards of whole conversations as answers come: after `shard_rows` rows, a minute, or the engine's end."""
    rows: list[DistillRow] = []
    flushed = time.monotonic()
    try:
        for answer in engine.answers(work.next_request):
            finished = work.take(answer)
            rows += finished
            speed.add(tokens=len(answer.completion_ids), units=1 if finished else 0)
            if len(rows) >= shard_rows or (rows and time.monotonic() - flushed > _FLUSH_SECONDS):
                write_shard(directory, rows, fingerprint=fingerprint, engine=engine.name)
                rows, flushed = [], time.monotonic()
    finally:  # an engine that fails, or an interrupt, costs no row that was finished
        if rows:
            write_shard(directory, rows, fingerprint=fingerprint, engine=engine.name)
    speed.finish()
