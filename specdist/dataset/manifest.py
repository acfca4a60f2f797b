"""Owns the record of a distillation dataset: what determines it, the counts over its rows, and reading it back.

Readers verify every shard's SHA-256 first. Rows are given in the order of their ids, however they lie in shards.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specdist.dataset.plan import Plan, RowIds
from specdist.dataset.shards import Shard, row_values, shard_paths
from specdist.errors import ArtifactError
from specdist.provenance import read_json, sha256_file, sha256_json
from specdist.schema import ChatFormat, DatasetInputs, DatasetManifest, DistillRow, TargetIdentity

MANIFEST_FILE = "manifest.json"
GIVEN_ENGINE = "given"  # of a dataset whose answers no target wrote


def dataset_fingerprint(inputs: DatasetInputs) -> str:
    """12 hex digits over all that determines a dataset's content; the name of its directory."""
    values = inputs.to_json()
    del values["target"]["model_id"]  # the same weights under another name are the same target
    values["samplings"] = [sampling.hashed_values() for sampling in inputs.samplings]
    return sha256_json(values)[:12]


def texts_sha256(inputs: DatasetInputs) -> str:
    """Hex SHA-256 of all that determines how answers are written, but the target: what two evaluations must share.

    Where every answer is greedy, what only sampling reads is left out.
    """
    values = inputs.to_json()
    del values["target"]
    values["samplings"] = [
        {"max_new_tokens": s.max_new_tokens} if s.is_greedy else s.hashed_values() for s in inputs.samplings
    ]
    if all(sampling.is_greedy for sampling in inputs.samplings):
        del values["seed"]
    return sha256_json(values)


def row_digest(row: DistillRow) -> bytes:
    """SHA-256 of a row's content."""
    values = {**row_values(row), "sampling": row.sampling.hashed_values()}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).digest()


class Tally:
    """Counts over the rows of a dataset, in any order; what the manifest says of them."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()
        self.first_turns: set[str] = set()
        self.finish_reasons: Counter[str] = Counter()
        self.domains: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()
        self.num_rows = self.prompt_tokens = self.completion_tokens = 0
        self._digests: list[bytes] = []

    def add(self, row: DistillRow, engine: str) -> None:
        self.num_rows += 1
        self.prompts.add(row.prompt_id)
        if row.turn == 0:
            self.first_turns.add(row.id)
        self.finish_reasons[row.finish_reason] += 1
        self.domains[row.domain] += 1
        self.engines[engine] += 1
        self.prompt_tokens += len(row.prompt_ids)
        self.completion_tokens += len(row.completion_ids)
        self._digests.append(row_digest(row))

    def values(self) -> dict[str, Any]:
        """The manifest's fields that follow from its rows."""
        return {
            "num_prompts": len(self.prompts),
            "num_rows": self.num_rows,
            "num_truncated": self.finish_reasons["length"],
            "num_prompt_tokens": self.prompt_tokens,
            "num_completion_tokens": self.completion_tokens,
            "num_supervised_tokens": self.completion_tokens,
            "finish_reasons": dict(self.finish_reasons),
            "domains": dict(self.domains),
            "engines": dict(self.engines),
            "rows_sha256": self.rows_sha256(),
        }

    def rows_sha256(self) -> str:
        """Hex SHA-256 of all rows, whatever their order."""
        return hashlib.sha256(b"".join(sorted(self._digests))).hexdigest()


def make_manifest(
    directory: Path, inputs: DatasetInputs, plan: Plan, row_ids: RowIds, *, tokens_per_second: float | None
) -> DatasetManifest:
    """The manifest of the shards that lie there. Raises ArtifactError where a row is missing or a shard is damaged."""
    tally = Tally()
    paths = shard_paths(directory)
    for path in paths:
        shard = Shard(path)
        for row in shard.rows():
            tally.add(row, shard.engine)
    if missing := len(plan.pending(tally.first_turns, inputs.samplings, row_ids)):
        raise ArtifactError(f"{directory}: {missing} conversations have no rows; run again to finish")
    asked = int(plan.num_turns().sum()) * len(inputs.samplings)
    later_turns = asked - tally.num_rows
    return DatasetManifest(
        inputs=inputs,
        num_asked=asked + sum(plan.rejected.values()) * len(inputs.samplings),
        rejected=plan.rejected | ({"later_turn": later_turns} if later_turns else {}),
        actions=plan.actions,
        tokens_per_second=tokens_per_second,
        **tally.values(),
        shards={path.name: sha256_file(path) for path in paths},
    )


def read_manifest(directory: Path) -> DatasetManifest:
    """The manifest of a finished dataset. Raises ArtifactError where it is not finished."""
    path = directory / MANIFEST_FILE
    return DatasetManifest.from_json(read_json(path), str(path))


def check_inputs(directory: Path, manifest: DatasetManifest, inputs: DatasetInputs) -> None:
    """Raise ArtifactError, naming what differs, unless the dataset was made from `inputs`."""
    found, wanted = asdict(manifest.inputs), asdict(inputs)
    for values in (found, wanted):
        values |= values.pop("target")
        del values["model_id"]
    if differences := [f"{key}: {found[key]} there, {wanted[key]} now" for key in wanted if found[key] != wanted[key]]:
        raise ArtifactError(
            f"{directory / MANIFEST_FILE}: made from other inputs ({'; '.join(differences)}); "
            "use another directory, or delete this one"
        )


def check_target(directory: Path, manifest: DatasetManifest, target: TargetIdentity, chat_format: ChatFormat) -> None:
    """Raise ArtifactError unless `target` wrote the dataset and reads its prompts in the same form."""
    check_inputs(directory, manifest, replace(manifest.inputs, target=target, chat_format=chat_format))


def verified_shards(directory: Path) -> tuple[DatasetManifest, list[Shard]]:
    """Manifest and shards of a finished dataset.

    Raises ArtifactError where the dataset is not finished or a shard's SHA-256 is not the manifest's.
    """
    manifest = read_manifest(directory)
    shards = []
    for name, expected in manifest.shards.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path}: no such file, the manifest lists it; delete the dataset and make it again")
        if (got := sha256_file(path)) != expected:
            raise ArtifactError(f"{path}: SHA-256 {got}, manifest {expected}; delete the dataset and make it again")
        shards.append(Shard(path))
    return manifest, shards


def read_rows(directory: Path) -> tuple[DatasetManifest, list[DistillRow]]:
    """Manifest and rows of a finished dataset, in the order of their ids. Raises as `verified_shards`."""
    manifest, shards = verified_shards(directory)
    return manifest, sorted((row for shard in shards for row in shard.rows()), key=lambda row: row.id)
