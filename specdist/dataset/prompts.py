"""Owns the PromptSet: a directory with `prompts.jsonl` and `manifest.json`, hashes of prompts, and reading them again.

A PromptSet is written by prepare.py and read row by row, so its size is bounded by the disk alone.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from specdist.errors import ArtifactError
from specdist.provenance import read_json, sha256_bytes, sha256_file, sha256_json
from specdist.record import Record
from specdist.schema import Prompt


@dataclass(frozen=True)
class SourceRecord(Record):
    """One source of a PromptSet: the hash of its content, rows read, bad rows, and prompts that were taken."""

    name: str
    sha256: str
    num_rows: int
    num_bad: int
    num_prompts: int


@dataclass(frozen=True)
class PromptManifest(Record):
    """What a PromptSet holds and what became of each row that was read.

    `prompts_sha256` is of the file, `content_sha256` of what the prompts say. `left_out` counts rows by reason, so
    that num_prompts + Σ left_out = num_rows; `bad` splits the bad ones up; `policy_actions` counts repaired rows.
    """

    num_prompts: int
    prompts_sha256: str
    domains: dict[str, int]
    languages: dict[str, int]
    licence: str | None = None
    content_sha256: str | None = None
    split: dict[str, str] = field(default_factory=dict)
    sources: list[SourceRecord] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)
    num_rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)
    policy_actions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Prompts on disk. Iterating reads them one by one."""

    path: Path
    manifest: PromptManifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the manifest and check the file against it. Raises ArtifactError where either is missing or altered."""
        where = path / "manifest.json"
        manifest = PromptManifest.from_json(read_json(where), str(where))
        prompts = cls(path, manifest)
        if not prompts.file.exists():
            raise ArtifactError(f"{prompts.file}: no such file; a PromptSet holds prompts.jsonl and manifest.json")
        if (got := sha256_file(prompts.file)) != manifest.prompts_sha256:
            raise ArtifactError(
                f"{prompts.file}: SHA-256 {got}, its manifest says {manifest.prompts_sha256}; restore the file, or "
                "pass the JSONL file itself to use it without a manifest"
            )
        return prompts

    @property
    def file(self) -> Path:
        return self.path / "prompts.jsonl"

    @cached_property
    def sha256(self) -> str:
        """Hash of what the prompts say, whatever their order and the file they came from."""
        return self.manifest.content_sha256 or prompts_sha256(self)

    def __len__(self) -> int:
        return self.manifest.num_prompts

    def __iter__(self) -> Iterator[Prompt]:
        with self.file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                try:
                    yield Prompt(row["id"], row["domain"], row["language"], row["messages"])
                except KeyError as error:
                    raise ArtifactError(f"{self.file}: line {number} has no {error}; pass it as a source") from None


def prompt_id(messages: list[dict[str, str]]) -> str:
    """First 16 hex digits of the SHA-256 of the messages' canonical JSON, contents in NFC and stripped."""
    normal = [{"role": m["role"], "content": unicodedata.normalize("NFC", m["content"]).strip()} for m in messages]
    return sha256_json(normal)[:16]


def prompt_line(prompt: Prompt) -> bytes:
    """The one way to write a prompt as a line, without its end."""
    row = {"id": prompt.id, "domain": prompt.domain, "language": prompt.language, "messages": prompt.messages}
    return json.dumps(row, ensure_ascii=False, separators=(", ", ": ")).encode()


def prompts_sha256(prompts: Iterable[Prompt]) -> str:
    """Hex SHA-256 of what `prompts` say, whatever their order and file. Keeps 32 bytes of each in memory."""
    digests = bytearray()
    for prompt in prompts:
        digests += hashlib.sha256(prompt_line(prompt)).digest()
    return lines_sha256(digests)


def lines_sha256(digests: bytes | bytearray) -> str:
    """Hex SHA-256 over the sorted SHA-256 digests of lines, given one after the other."""
    return sha256_bytes(np.sort(np.frombuffer(digests, "S32")).tobytes())
