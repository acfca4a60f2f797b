"""Owns the PromptSet: reading prompts, checking every row, prompt ids, and a small sample that covers all domains.

A row of `prompts.jsonl` is a JSON object with `messages` (or `prompt`, one user turn as a string) and, if wanted,
`id`, `domain` and `language`. Roles must be an optional system turn, then user and assistant in turn, and end with
user: a row that is not so is reported, never repaired.
"""

import json
import logging
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError, ConfigError
from specdist.provenance import read_json, sha256_file, sha256_json
from specdist.schema import Prompt

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
_SHOWN = 10  # bad rows spelt out in an error; the rest are counted


class _BadRow(ValueError):
    """Why one row cannot be used."""

    def __init__(self, reason: str, row_id: str = "?") -> None:
        super().__init__(reason)
        self.row_id = row_id


def prompt_id(messages: list[dict[str, str]]) -> str:
    """First 16 hex digits of the SHA-256 of the messages' canonical JSON, contents in NFC and stripped."""
    normal = [{"role": m["role"], "content": unicodedata.normalize("NFC", m["content"]).strip()} for m in messages]
    return sha256_json(normal)[:16]


def prompts_sha256(prompts: list[Prompt]) -> str:
    """Hex SHA-256 of what `prompts` say, whatever their order and the file they came from."""
    return sha256_json(sorted((p.id, p.domain, p.language, p.messages) for p in prompts))


def load_prompts(path: Path, *, limit: int | None = None, strict: bool = True) -> list[Prompt]:
    """Read a JSONL file, or a PromptSet directory (`prompts.jsonl` checked against its `manifest.json`).

    Contents are kept to the byte. Lines end at "\\n" only; exact duplicates are dropped and counted in the log.
    A missing `domain` is "general", a missing `language` "und", a missing `id` the hash of the messages. `limit` keeps
    that many prompts, spread over the domains. `strict=False` drops bad rows with a warning instead of raising.
    Raises ArtifactError with file, line, id and reason of the bad rows, and where no prompt is left.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit}: expected 1 or more prompts")
    file = _jsonl_of(path)
    prompts, bad, duplicates = _read_rows(file)
    if bad:
        message = _describe(file, bad, len(prompts) + len(bad) + duplicates)
        if strict:
            raise ArtifactError(message)
        logger.warning("%s\nThese rows are dropped.", message)
    if duplicates:
        logger.info("%s: dropped %d exact duplicates", file, duplicates)
    if not prompts:
        raise ArtifactError(f"{file}: holds no usable prompt; expected one JSON object per line")
    return prompts if limit is None else _spread(prompts, limit)


def _jsonl_of(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise ArtifactError(f"{path}: no such file; expected a JSONL file or a directory with prompts.jsonl")
        return path
    file = path / "prompts.jsonl"
    manifest = read_json(path / "manifest.json")
    expected = manifest.get("prompts_sha256") if isinstance(manifest, dict) else None
    if not file.exists():
        raise ArtifactError(f"{file}: no such file; a PromptSet holds prompts.jsonl and manifest.json")
    if (got := sha256_file(file)) != expected:
        raise ArtifactError(
            f"{file}: SHA-256 {got}, its manifest says {expected}; restore the file, or pass the JSONL file itself "
            "to use it without a manifest"
        )
    return file


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of each line that is not blank. Only b"\\n" ends a line."""
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _read_rows(file: Path) -> tuple[list[Prompt], list[tuple[int, _BadRow]], int]:
    """Prompts in file order, bad rows by line number, and how many rows repeated an earlier one."""
    prompts: list[Prompt] = []
    bad: list[tuple[int, _BadRow]] = []
    seen: dict[str, int] = {}  # hash of messages -> line
    ids: dict[str, int] = {}  # id -> line
    duplicates = 0
    for number, line in _lines(file):
        try:
            prompt = _parse(line)
            digest = prompt_id(prompt.messages)
            if digest in seen:
                duplicates += 1
                continue
            if prompt.id in ids:
                raise _BadRow(f"id is that of line {ids[prompt.id]}, whose messages differ", ascii(prompt.id))
        except _BadRow as error:
            bad.append((number, error))
            continue
        seen[digest] = ids[prompt.id] = number
        prompts.append(prompt)
    return prompts, bad, duplicates


def _describe(file: Path, bad: list[tuple[int, _BadRow]], num_rows: int) -> str:
    lines = [f"{file}: {len(bad)} of {num_rows} rows cannot be used; correct or remove them"]
    lines += [f"  line {number}, id {error.row_id}: {error}" for number, error in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more")
    return "\n".join(lines)


def _parse(line: bytes) -> Prompt:
    """One prompt from one line. Raises _BadRow."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadRow(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise _BadRow("not JSON that can be read (nested too deeply)") from None
    if not isinstance(row, dict):
        raise _BadRow(f"expected a JSON object, got {type(row).__name__}")
    row_id = row.get("id")
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        row_id = str(row_id)
    try:
        messages = _messages(row)
        fields = {"domain": row.get("domain", "general"), "language": row.get("language", "und")}
        fields["id"] = prompt_id(messages) if row_id is None else row_id
        for name, value in fields.items():
            if not isinstance(value, str) or not value:
                raise _BadRow(f"{name}: expected a string that is not empty, got {value!r}")
            _check_text(value, name)
    except _BadRow as error:
        error.row_id = ascii(row_id) if row_id is not None else "?"
        raise
    return Prompt(id=fields["id"], domain=fields["domain"], language=fields["language"], messages=messages)


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    if ("messages" in row) == ("prompt" in row):
        raise _BadRow('expected either "messages" or "prompt"')
    turns = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if not isinstance(turns, list) or not turns:
        raise _BadRow("messages: expected a list that is not empty")
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise _BadRow(f"messages[{i}]: expected an object with role and content")
        role, content = turn["role"], turn["content"]
        if role not in ROLES:
            raise _BadRow(f"messages[{i}]: unknown role {role!r}; expected one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise _BadRow(f"messages[{i}]: content is {type(content).__name__}, expected text")
        if not content.strip():
            raise _BadRow(f"messages[{i}]: content is empty")
        _check_text(content, f"messages[{i}]")
        messages.append({"role": role, "content": content})
    _check_order([m["role"] for m in messages])
    return messages


def _check_text(text: str, where: str) -> None:
    """A lone surrogate (a JSON escape can spell one) has no UTF-8 form: no tokenizer and no file could take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow(f"{where}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from None


def _check_order(roles: list[str]) -> None:
    start = 1 if roles[0] == "system" else 0
    for i, role in enumerate(roles[start:], start=start):
        expected = "user" if (i - start) % 2 == 0 else "assistant"
        if role != expected:
            before = f"messages[{i - 1}] is {roles[i - 1]}, " if i else ""
            raise _BadRow(f"{before}messages[{i}] is {role}, expected {expected}: turns must alternate, user first")
    if roles[-1] != "user":
        raise _BadRow(f"messages[{len(roles) - 1}], the last, is {roles[-1]}, expected user: the target answers it")


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts taken from the domains in turn, each domain in the order of its ids; in file order."""
    domains: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        domains[prompt.domain].append(prompt)
    turns = sorted(
        (turn, domain, prompt.id)
        for domain, members in domains.items()
        for turn, prompt in enumerate(sorted(members, key=lambda p: p.id))
    )
    chosen = {row_id for _, _, row_id in turns[:limit]}
    return [p for p in prompts if p.id in chosen]
