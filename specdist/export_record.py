"""Owns `export.json`: what an export holds, and whether its files are still those.

Gate, registry, import and exporters ask here, so that all refuse the same files with the same reason.
"""

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdist import provenance
from specdist.drafter_config import HYDRA
from specdist.errors import ArtifactError
from specdist.record import Record
from specdist.safetensors_file import differences, read_header
from specdist.schema import TargetIdentity

EXPORT_FILE = "export.json"
CONFIG_FILE = "config.json"
# What engines read as weights, by its name alone, whatever else lies beside
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")


@dataclass(frozen=True)
class ExportRecord(Record):
    """What an export holds, for which target, and how to serve it.

    `speculative_config` is vLLM's, with "." for this directory; `files` maps name to SHA-256; `drafter_sha256` is the
    hash over `files`, which names the drafter everywhere else. `tensors` ("F32 [268, 32]" by name, of all safetensors
    files) and `config_keys` say what was altered where a hash differs.
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
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    config_keys: list[str] = field(default_factory=list)

    def vllm_command(self, target: str, drafter: str) -> str | None:
        """The shell command by which vLLM serves `target` with the export at `drafter`; None where no engine can."""
        if self.drafter_kind == HYDRA:
            return None
        config = json.dumps({**self.speculative_config, "model": drafter})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"


def write_record(directory: Path, record: ExportRecord) -> ExportRecord:
    """Hash the files of a finished export and write `export.json`; returns the completed record."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != EXPORT_FILE)
    files = {path.relative_to(directory).as_posix(): provenance.sha256_file(path) for path in paths}
    config = provenance.read_json(directory / CONFIG_FILE) if CONFIG_FILE in files else {}
    complete = replace(
        record,
        files=files,
        drafter_sha256=provenance.sha256_json(files),
        tensors={name: read_header(directory / name) for name in files if name.endswith(".safetensors")},
        config_keys=sorted(config),
    )
    provenance.write_json(directory / EXPORT_FILE, complete.to_json())
    return complete


def read_record(directory: Path) -> ExportRecord:
    """The record of an export whose files are whole; other files than weights may lie beside them.

    Raises ArtifactError naming what is missing, altered or foreign, and how.
    """
    path = directory / EXPORT_FILE
    record = ExportRecord.from_json(provenance.read_json(path), str(path))
    if record.drafter_sha256 != provenance.sha256_json(record.files):
        raise ArtifactError(f"{path}: drafter_sha256 is not that of its files; export again")
    if faults := [fault for name in record.files if (fault := _fault(directory / name, name, record))]:
        raise ArtifactError("; ".join([*faults[:3], "export again"]))
    weights = (p for p in sorted(directory.rglob("*")) if p.suffix in _WEIGHTS)
    if foreign := [p for p in weights if p.relative_to(directory).as_posix() not in record.files]:
        raise ArtifactError(f"{foreign[0]}: foreign to the export, and engines would read it as weights; remove it")
    return record


def _fault(path: Path, name: str, record: ExportRecord) -> str | None:
    """What is wrong with one file of the export, in words; None where nothing is."""
    if path.is_file() and provenance.sha256_file(path) == record.files[name]:
        return None
    return f"{path}: missing, incomplete or altered since the export ({_how(path, name, record)})"


def _how(path: Path, name: str, record: ExportRecord) -> str:
    if not path.is_file():
        return "no such file"
    try:
        if name in record.tensors:
            return "; ".join(differences(read_header(path), record.tensors[name])) or "values differ"
        if name == CONFIG_FILE:
            return _key_differences(path, record.config_keys)
    except ArtifactError as error:
        return str(error).removeprefix(f"{path}: ").removesuffix("; export again")
    return "its hash differs"


def _key_differences(path: Path, expected: list[str]) -> str:
    try:
        found = set(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        return f"not readable as JSON: {error}"
    missing, unknown = sorted(set(expected) - found), sorted(found - set(expected))
    parts = [f"missing keys {missing}"] * bool(missing) + [f"unknown keys {unknown}"] * bool(unknown)
    return ", ".join(parts) if expected and parts else "values differ"
