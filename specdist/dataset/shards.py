"""Owns the Parquet form of distillation rows: shards that are written whole, each named after its own hash.

The name tells whether a shard is as it was written, to the bit, before any manifest exists. In its metadata are the
fingerprint of its dataset and the engine that wrote it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specdist.errors import ArtifactError, ConfigError
from specdist.provenance import atomic_path, sha256_bytes, sha256_file
from specdist.schema import DistillRow, SamplingSpec

_FINGERPRINT_KEY, _ENGINE_KEY = b"specdist.fingerprint", b"specdist.engine"
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("max_new_tokens", pa.int32()),
        ("min_p", pa.float64()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("sample_index", pa.int32()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("sampling", _SAMPLING),
        ("seed", pa.int64()),
        ("top_ids", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float16())),
        ("tail_mass", pa.list_(pa.float32())),
    ]
)


def shard_paths(directory: Path) -> list[Path]:
    """The shards that lie in a dataset's directory, by name."""
    return sorted(directory.glob("shard-*.parquet"))


def write_shard(directory: Path, rows: Sequence[DistillRow], *, fingerprint: str, engine: str) -> Path:
    """Write rows as a new shard, atomically: shard-<16 hex digits of its SHA-256>.parquet."""
    schema = _SCHEMA.with_metadata({_FINGERPRINT_KEY: fingerprint.encode(), _ENGINE_KEY: engine.encode()})
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([_plain(row) for row in rows], schema=schema), buffer, compression="zstd")
    data = buffer.getvalue().to_pybytes()
    path = directory / _name(sha256_bytes(data))
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    return path


def _name(sha256: str) -> str:
    return f"shard-{sha256[:16]}.parquet"


def row_values(row: DistillRow) -> dict[str, Any]:
    """A row's fields by name; its lists are the row's own, which `dataclasses.asdict` would copy token by token."""
    return {**vars(row), "sampling": vars(row.sampling)}


def _plain(row: DistillRow) -> dict[str, Any]:
    values = row_values(row)
    if row.top_logprobs is not None:
        values["top_logprobs"] = np.asarray(row.top_logprobs, dtype=np.float16)
    return values


class Shard:
    """A shard that is open for reading. Raises ArtifactError where it is missing, cut off or altered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                metadata = file.schema_arrow.metadata or {}
            self.fingerprint = metadata[_FINGERPRINT_KEY].decode()
            self.engine = metadata[_ENGINE_KEY].decode()
        except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception | str) -> ArtifactError:
        return ArtifactError(f"{self.path}: not a readable shard ({error}); delete it and run again")

    def verify(self) -> None:
        """Raise ArtifactError unless the file has the hash that is in its name."""
        if _name(sha256 := sha256_file(self.path)) != self.path.name:
            raise self._unreadable(f"its SHA-256 is {sha256}, which its name is not")

    def columns(self, names: Sequence[str] | None = None) -> pa.Table:
        """These columns, or all."""
        try:
            with pq.ParquetFile(self.path) as file:
                return file.read(columns=None if names is None else list(names))
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def rows(self) -> Iterator[DistillRow]:
        """The rows in file order."""
        for batch in self.columns().to_batches(max_chunksize=1024):
            try:
                rows = [DistillRow(**{**r, "sampling": SamplingSpec(**r["sampling"])}) for r in batch.to_pylist()]
            except (TypeError, KeyError, ValueError, ConfigError) as error:
                raise self._unreadable(error) from error
            yield from rows
