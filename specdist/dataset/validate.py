"""Owns checking a finished dataset: files against the manifest, and every row against what a row must be."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specdist.dataset.manifest import Tally, read_manifest
from specdist.dataset.plan import RowIds, row_seed, slots
from specdist.dataset.shards import Shard, shard_paths
from specdist.errors import ArtifactError
from specdist.provenance import sha256_file
from specdist.schema import DatasetInputs, DatasetManifest, DistillRow

_SHOWN = 5  # examples of each kind of fault
_MASS_TOLERANCE = 2e-3  # of log-probabilities that are stored in 16 bits


@dataclass
class Faults:
    """What is wrong, by kind: how often, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, where: str) -> None:
        self.counts[kind] += 1
        if len(self.examples[kind]) < _SHOWN:
            self.examples[kind].append(where)

    def lines(self) -> list[str]:
        """One line for each kind."""
        return [f"{kind}: {count} ({', '.join(self.examples[kind])})" for kind, count in self.counts.items()]


def validate_dataset(directory: Path) -> tuple[DatasetManifest, Faults]:
    """Hash every shard again and check every row and every count of the manifest.

    Raises ArtifactError where there is no readable manifest.
    """
    manifest, faults, tally = read_manifest(directory), Faults(), Tally()
    check = _RowCheck(manifest.inputs)
    turns: defaultdict[tuple[str, str, int], set[int]] = defaultdict(set)
    seen: set[str] = set()
    for path in _shards(directory, manifest, faults):
        try:
            shard = Shard(path)
            for row in shard.rows():
                for kind in check.faults(row):
                    faults.add(kind, f"row {row.id} in {path.name}")
                if row.id in seen:
                    faults.add("the id of another row", f"row {row.id} in {path.name}")
                seen.add(row.id)
                turns[row.prompt_id, str(row.sampling), row.sample_index].add(row.turn)
                tally.add(row, shard.engine)
        except ArtifactError as error:
            faults.add("shard cannot be read", str(error))
    for (prompt_id, *_), found in turns.items():
        if found != set(range(len(found))):
            faults.add("a turn of the conversation is missing", f"prompt {prompt_id}: turns {sorted(found)}")
    _check_counts(manifest, tally, faults)
    return manifest, faults


def _shards(directory: Path, manifest: DatasetManifest, faults: Faults) -> Iterator[Path]:
    for path in shard_paths(directory):
        if path.name not in manifest.shards:
            faults.add("shard is not in the manifest", path.name)
    for name, expected in manifest.shards.items():
        path = directory / name
        if not path.is_file():
            faults.add("shard of the manifest is missing", name)
            continue
        if sha256_file(path) != expected:
            faults.add("shard's SHA-256 is not the manifest's", name)
        yield path


def _check_counts(manifest: DatasetManifest, tally: Tally, faults: Faults) -> None:
    for name, value in tally.values().items():
        if (stated := getattr(manifest, name)) != value:
            faults.add(f"manifest's {name} is not that of the rows", f"{stated} stated, {value} counted")


class _RowCheck:
    """What must hold for a row of a dataset that was made from `inputs`."""

    def __init__(self, inputs: DatasetInputs) -> None:
        self.inputs = inputs
        self.row_ids = RowIds(inputs.samplings, inputs.seed)
        self.slots = set(slots(inputs.samplings))
        self.eos = set(inputs.target.eos_token_ids)

    def faults(self, row: DistillRow) -> Iterator[str]:
        if (row.sampling, row.sample_index) not in self.slots:
            yield "sampling is not in the manifest"
        elif row.id != self.row_ids(row.prompt_id, row.turn, row.sampling, row.sample_index):
            yield "id is not the hash of what the row is of"
        if row.seed != row_seed(row.id):
            yield "seed is not that of the id"
        if len(row.prompt_ids) > self.inputs.max_prompt_tokens or not row.prompt_ids:
            yield "prompt is empty or longer than max_prompt_tokens"
        ids = row.completion_ids
        if not 1 <= len(ids) <= row.sampling.max_new_tokens:
            yield "completion is empty or longer than max_new_tokens"
            return
        if not all(0 <= token < self.inputs.target.vocab_size for token in [*row.prompt_ids, *ids]):
            yield "token id outside the vocabulary"
        if self.eos.intersection(ids[:-1]):
            yield "end of text before the end"
        if row.finish_reason != ("stop" if ids[-1] in self.eos else "length"):
            yield "finish_reason does not fit the last token"
        elif row.finish_reason == "length" and len(ids) != row.sampling.max_new_tokens:
            yield "cut off before max_new_tokens"
        yield from self._top_faults(row)

    def _top_faults(self, row: DistillRow) -> Iterator[str]:
        size = self.inputs.num_top_logprobs
        top_ids, logprobs, tail = row.top_ids or [], row.top_logprobs or [], row.tail_mass or []
        length = len(row.completion_ids)
        if (len(top_ids), len(logprobs), len(tail)) != (size * length, size * length, length if size else 0):
            yield "log-probabilities do not fit the completion's length"
            return
        for step, rest in enumerate(tail):
            best = logprobs[step * size : (step + 1) * size]
            if best != sorted(best, reverse=True) or len(set(top_ids[step * size : (step + 1) * size])) != size:
                yield "best tokens are not in order, or repeat"
            if abs(sum(math.exp(value) for value in best) + rest - 1.0) > _MASS_TOLERANCE:
                yield "best tokens and tail do not add up to one"
