"""Owns the plan of a distillation dataset: which conversations are answered, rendered once, and what is still to do.

The plan lies in one Arrow file that is read through memory mapping, so a million prompts cost little memory and a
restart does not render them again. One conversation under one sampling is a unit of work: one process answers it, its
rows are written together, and the id of its first row tells whether it is done.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specdist.dataset.render import Messages, PromptRejected, Renderer, history, open_turns
from specdist.errors import ArtifactError
from specdist.progress import track
from specdist.provenance import atomic_path, sha256_json
from specdist.schema import DatasetInputs, Prompt, SamplingSpec

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.arrow"
_CHUNK = 1024  # prompts rendered at a time
_SHOWN = 10  # prompts whose rejection is spelt out; the rest are counted
_COUNTS_KEY = b"specdist.counts"
_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("num_turns", pa.int32()),
        ("messages", pa.string()),  # JSON; null where there is one turn only
        ("prompt_ids", pa.list_(pa.int32())),  # of the first turn
    ]
)


class RowIds:
    """Ids of rows: a hash of what a row is of, so that it is the same in any batch, order or process."""

    def __init__(self, samplings: Sequence[SamplingSpec], seed: int) -> None:
        self.seed = seed
        self._samplings = {s: sha256_json(s.hashed_values()) for s in samplings}

    def __call__(self, prompt_id: str, turn: int, sampling: SamplingSpec, sample_index: int) -> str:
        """First 16 hex digits of the SHA-256 of prompt id, turn, sampling, sample index and seed."""
        text = f"{prompt_id} {turn} {self._samplings[sampling]} {sample_index} {self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_seed(row_id: str) -> int:
    """The seed of a row's random numbers: 60 bits of its id, which fit a signed 64-bit column."""
    return int(row_id[:15], 16)


def slots(samplings: Sequence[SamplingSpec]) -> list[tuple[SamplingSpec, int]]:
    """Each sampling with the number of its repeat: the answers that every conversation gets."""
    seen: Counter[SamplingSpec] = Counter()
    result = []
    for sampling in samplings:
        result.append((sampling, seen[sampling]))
        seen[sampling] += 1
    return result


@dataclass(frozen=True)
class Conversation:
    """A conversation of the plan; `messages` is None where it has one turn."""

    prompt_id: str
    domain: str
    num_turns: int
    messages: Messages | None
    prompt_ids: list[int]


class Plan:
    """The conversations of one dataset, in the order of their prompts."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError where the file cannot be read."""
        try:
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            counts = json.loads(self._table.schema.metadata[_COUNTS_KEY])
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: not a readable plan ({error}); delete it and run again") from error
        self.rejected: dict[str, int] = counts["rejected"]
        self.actions: dict[str, int] = counts["actions"]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Conversation:
        row = self._table.slice(index, 1).to_pylist()[0]
        messages = None if row["messages"] is None else json.loads(row["messages"])
        return Conversation(row["prompt_id"], row["domain"], row["num_turns"], messages, row["prompt_ids"])

    @cached_property
    def prompt_ids(self) -> list[str]:
        """Ids of the prompts, one a conversation."""
        return self._table.column("prompt_id").to_pylist()

    def num_turns(self) -> np.ndarray:
        """Turns to be answered in each conversation."""
        return self._table.column("num_turns").to_numpy()

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation's first prompt."""
        return pc.list_value_length(self._table.column("prompt_ids")).to_numpy()

    def pending(self, done: Collection[str], samplings: Sequence[SamplingSpec], row_ids: RowIds) -> np.ndarray:
        """Units that are not `done` (ids of rows), as [U, 2] of conversation and slot: longest prompts first.

        If memory does not suffice, it shows at once; prompts of like length, and the answers to one prompt, are
        neighbours.
        """
        numbered = list(enumerate(slots(samplings)))
        units = [
            (index, slot)
            for index, prompt_id in enumerate(self.prompt_ids)
            for slot, (sampling, repeat) in numbered
            if row_ids(prompt_id, 0, sampling, repeat) not in done
        ]
        found = np.array(units, dtype=np.int64).reshape(-1, 2)
        return found[np.argsort(-self.lengths()[found[:, 0]], kind="stable")]


class Limits:
    """What a prompt and its answer may be long."""

    def __init__(self, inputs: DatasetInputs) -> None:
        self.max_prompt_tokens = inputs.max_prompt_tokens
        self.context_length = inputs.context_length
        self.max_new_tokens = max(s.max_new_tokens for s in inputs.samplings)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise PromptRejected: "too_long" for max_prompt_tokens, "context_length" for prompt and answer together."""
        length = len(prompt_ids)
        if length > self.max_prompt_tokens:
            raise PromptRejected("too_long", f"{length} tokens, more than max_prompt_tokens {self.max_prompt_tokens}")
        if length + self.max_new_tokens > self.context_length:
            raise PromptRejected(
                "context_length",
                f"{length} tokens and an answer of {self.max_new_tokens} exceed the context of {self.context_length}",
            )


def write_plan(path: Path, prompts: Iterable[Prompt], num_prompts: int, renderer: Renderer, limits: Limits) -> None:
    """Render every prompt's first turn and write the plan; prompts that cannot be used are counted by reason.

    Raises ArtifactError where no prompt is usable.
    """
    rejected: Counter[str] = Counter()
    rest = iter(track(prompts, num_prompts, "rendering prompts", logger))
    batches = []
    while chunk := list(islice(rest, _CHUNK)):
        batches.append(_render_chunk(chunk, renderer, limits, rejected))
    if not sum(batch.num_rows for batch in batches):
        raise ArtifactError(f"no prompt is left of {num_prompts}; rejected by reason: {dict(rejected)}")
    if rejected:
        logger.warning("left out %d of %d prompts, by reason: %s", rejected.total(), num_prompts, dict(rejected))
    counts = json.dumps({"rejected": rejected, "actions": renderer.actions})
    schema = _SCHEMA.with_metadata({_COUNTS_KEY: counts.encode()})
    with atomic_path(path) as temporary, pa.ipc.new_file(temporary, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _render_chunk(
    chunk: Sequence[Prompt], renderer: Renderer, limits: Limits, rejected: Counter[str]
) -> pa.RecordBatch:
    rows = []
    turns = [open_turns(prompt.messages) for prompt in chunk]
    first = [history(prompt.messages, [], 0) for prompt in chunk]
    for prompt, ends, ids in zip(chunk, turns, renderer.encode_many(first), strict=True):
        try:
            if isinstance(ids, PromptRejected):
                raise ids
            limits.check(ids)
        except PromptRejected as error:
            rejected[error.reason] += 1
            if rejected.total() <= _SHOWN:
                logger.info("prompt %s is left out: %s", prompt.id, error)
            continue
        messages = json.dumps(prompt.messages, ensure_ascii=False) if len(ends) > 1 else None
        rows.append(
            {
                "prompt_id": prompt.id,
                "domain": prompt.domain,
                "num_turns": len(ends),
                "messages": messages,
                "prompt_ids": ids,
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
