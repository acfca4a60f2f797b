"""Owns the Parquet form of distillation rows: one shard per unit of work, its dataset's fingerprint inside."""

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specdist.errors import ArtifactError
from specdist.provenance import atomic_path
from specdist.schema import DistillRow, SamplingSpec

_FINGERPRINT_KEY = b"specdist.fingerprint"
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("max_new_tokens", pa.int32()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("sampling", _SAMPLING),
        ("seed", pa.int64()),
    ]
)


def shard_path(directory: Path, unit: int) -> Path:
    """Where the rows of a unit lie."""
    return directory / f"shard-{unit:05d}.parquet"


def write_shard(path: Path, rows: list[DistillRow], fingerprint: str) -> None:
    """Write a shard atomically, with a checksum on every page."""
    schema = _SCHEMA.with_metadata({_FINGERPRINT_KEY: fingerprint.encode()})
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_shard(path: Path) -> tuple[str, list[DistillRow]]:
    """Fingerprint and rows of a shard. Raises ArtifactError where it is missing, cut off or altered."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        fingerprint = (table.schema.metadata or {}).get(_FINGERPRINT_KEY, b"").decode()
        rows = [DistillRow(**{**row, "sampling": SamplingSpec(**row["sampling"])}) for row in table.to_pylist()]
    except (OSError, pa.ArrowException, TypeError, KeyError, ValueError) as error:
        raise ArtifactError(f"{path}: not a readable shard ({error}); delete it and run again") from error
    return fingerprint, rows
