"""Owns where prompts come from: a JSONL or Parquet file, a PromptSet directory, or anything `datasets` can load.

A source is named by one string: a path, or DATASET[@REVISION][:CONFIGURATION][:SPLIT] with a directory or a hub name.
A path that exists wins. Rows come one by one, whatever the size of the source, with their number from 1.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specdist.dataset.conversation import CONVERSATION_FIELDS, FIELDS
from specdist.dataset.prompts import PromptSet
from specdist.errors import ArtifactError
from specdist.provenance import sha256_json, sha256_tree

Rows = Iterator[tuple[int, bytes | dict[str, Any]]]
_BATCH = 1024  # rows decoded at a time
_BLOCK = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".csv", ".txt")


@dataclass(frozen=True)
class Source:
    """Rows to read. `sha256` tells contents apart; `unit` is what a row's number counts; `domain` is the default."""

    name: str
    sha256: str
    num_rows: int
    unit: str
    domain: str
    rows: Callable[[], Rows]


def open_source(name: str, domain: str | None = None) -> Source:
    """Find what `name` means and hash it; no row is decoded yet. Raises ArtifactError where there is no such source."""
    path = Path(name)
    if path.is_file():
        return _parquet(name, path, domain) if _begins_with(path, b"PAR1") else _jsonl(name, path, domain)
    if path.is_dir() and any((path / file).exists() for file in ("prompts.jsonl", "manifest.json")):
        return _jsonl(name, PromptSet.open(path).file, domain)
    return _dataset(name, domain)


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _jsonl(name: str, path: Path, domain: str | None) -> Source:
    digest, num_lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            num_lines += block.count(b"\n")
            last = block[-1:]
    num_lines += last != b"\n"
    return Source(name, digest.hexdigest(), num_lines, "line", domain or "general", lambda: _lines(path))


def _lines(path: Path) -> Rows:
    """Lines that are not blank. Only b"\\n" ends a line, so U+2028 and U+0085 are content."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _parquet(name: str, path: Path, domain: str | None) -> Source:
    try:
        with pq.ParquetFile(path) as file:
            columns, num_rows = file.schema_arrow.names, file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: not readable as Parquet ({error})") from error
    wanted = _wanted(name, columns)
    with path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    return Source(name, digest, num_rows, "row", domain or "general", lambda: _parquet_rows(path, wanted))


def _parquet_rows(path: Path, columns: list[str]) -> Rows:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not readable as Parquet after row {number} ({error})") from error


def _wanted(name: str, columns: list[str]) -> list[str]:
    if not set(columns) & set(CONVERSATION_FIELDS):
        expected = ", ".join(CONVERSATION_FIELDS)
        raise ArtifactError(f"{name}: columns {', '.join(columns)}; expected one of {expected}: rename the column")
    return [column for column in columns if column in FIELDS]


def _dataset(name: str, domain: str | None) -> Source:
    """A dataset on disk or on the hub; it is read from its memory-mapped cache."""
    base, config, split = _parts(name)
    path, _, revision = base.partition("@") if not Path(base).exists() else (base, "", "")
    is_directory = Path(path).is_dir()
    if not is_directory and (not _HUB_NAME.fullmatch(path) or path.endswith(_FILE_SUFFIXES)):
        raise ArtifactError(f"{name}: no such file or directory, and no name that a dataset on the hub could have")
    dataset = _load(name, path, config, split, revision or None)
    columns = _wanted(name, dataset.column_names)
    content = sha256_tree(Path(path)) if is_directory else dataset._fingerprint
    digest = sha256_json({"content": content, "config": config, "split": split})
    rows = dataset.select_columns(columns)
    own_name = Path(path).resolve().name if is_directory else path.rpartition("/")[2]
    return Source(name, digest, len(dataset), "row", domain or own_name, lambda: _dataset_rows(rows))


def _parts(name: str) -> tuple[str, str | None, str]:
    """Path or hub name, configuration and split."""
    if Path(name).exists():
        return name, None, "train"
    base, *rest = name.rsplit(":", 2) if not Path(name.rpartition(":")[0]).exists() else name.rsplit(":", 1)
    return base, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _load(name: str, path: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if Path(path).is_dir() and any((Path(path) / f).exists() for f in ("state.json", "dataset_dict.json")):
            loaded = load_from_disk(path)
            return loaded[split] if isinstance(loaded, DatasetDict) else loaded
        return load_dataset(path, config, split=split, revision=revision)
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        what = "not loadable as a dataset" if Path(path).exists() else "no such file, and not loadable as a dataset"
        raise ArtifactError(f"{name}: {what} (split {split!r}): {reason}") from error


def _dataset_rows(dataset: Any) -> Rows:
    number = 0
    for batch in dataset.iter(_BATCH):
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(columns, values, strict=True))
