"""Owns `export.json`, and the check that an export on disk is the drafter that was meant.

Every exporter writes into a temporary directory, reads the weights back, compares them, and only then renames.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdist import provenance
from specdist.errors import ArtifactError
from specdist.record import Record
from specdist.schema import TargetIdentity

EXPORT_FILE = "export.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(frozen=True)
class ExportRecord(Record):
    """What an export holds, for which target, and how to serve it.

    `speculative_config` is vLLM's, with "." for this directory; `files` maps name to SHA-256; `drafter_sha256` is the
    hash over `files`, which names the drafter everywhere else.
    """

    format: str
    drafter_kind: str
    target: TargetIdentity
    lossless: bool
    num_parameters: int
    checkpoint_step: int
    speculative_config: dict[str, Any]
    engines: dict[str, str]
    known_limits: list[str]
    drafter_sha256: str = ""
    files: dict[str, str] = field(default_factory=dict)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the target's tokenizer files byte for byte. Raises ArtifactError where the source has none."""
    copied = [shutil.copy(source / name, destination / name) for name in _TOKENIZER_FILES if (source / name).exists()]
    if not copied:
        raise ArtifactError(f"{source}: holds no tokenizer files; a draft model is served with the target's tokenizer")


def check_read_back(directory: Path, expected: Mapping[str, Tensor]) -> None:
    """Read every safetensors file of `directory` and compare names, shapes, dtypes and values with `expected`.

    Raises ArtifactError on any difference.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    if found.keys() != expected.keys():
        wrong = sorted(found.keys() ^ expected.keys())
        raise ArtifactError(f"{directory}: tensors missing or too many after writing: {wrong[:6]}; export again")
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor.cpu()):
            raise ArtifactError(f"{directory}: tensor {name} read back differs from the one written; export again")


def write_record(directory: Path, record: ExportRecord) -> ExportRecord:
    """Hash the files of a finished export and write `export.json`; returns the completed record."""
    paths = {p.relative_to(directory).as_posix(): p for p in sorted(directory.rglob("*")) if p.is_file()}
    files = {name: provenance.sha256_file(path) for name, path in paths.items() if name != EXPORT_FILE}
    complete = ExportRecord(**{**vars(record), "files": files, "drafter_sha256": provenance.sha256_json(files)})
    provenance.write_json(directory / EXPORT_FILE, complete.to_json())
    return complete


def read_record(directory: Path) -> ExportRecord:
    """The record of an export whose files are whole. Raises ArtifactError naming one that is missing or altered."""
    record = ExportRecord.from_json(provenance.read_json(directory / EXPORT_FILE), str(directory / EXPORT_FILE))
    if record.drafter_sha256 != provenance.sha256_json(record.files):
        raise ArtifactError(f"{directory / EXPORT_FILE}: drafter_sha256 is not that of its files; export again")
    for name, digest in record.files.items():
        path = directory / name
        if not path.exists() or provenance.sha256_file(path) != digest:
            raise ArtifactError(f"{path}: missing, incomplete or altered since the export; export again")
    return record
