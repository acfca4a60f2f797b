"""Builds registries for tests: exports, publications, kills, changes behind the registry's back.

Import the fixtures `root` and `registry` together: the second needs the first.
"""

import functools
import json
import sqlite3
import tempfile
from pathlib import Path

import pytest

from specdist.export_record import ExportRecord, write_record
from specdist.registry.mlflow import create_database
from specdist.registry.store import Registry
from specdist.schema import TargetIdentity

MODEL = "tiny-draft"


class Killed(BaseException):
    """Stands for a kill: no `except Exception` sees it."""


@functools.cache
def empty_database() -> bytes:
    """A migrated database without models. Migrating takes a second, so tests share one."""
    with tempfile.TemporaryDirectory() as directory:
        create_database(path := Path(directory) / "mlflow.db")
        return path.read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "registry"
    directory.mkdir()
    (directory / "mlflow.db").write_bytes(empty_database())
    return directory


@pytest.fixture
def registry(root: Path) -> Registry:
    return Registry(root, MODEL)


def make_export(directory: Path, content: str) -> Path:
    """A whole export of one tensor, whose bytes are `content`."""
    (directory / "extra").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 100}')
    header = {"weight": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content.encode())
    (directory / "extra" / "notes.txt").write_text("nested")
    target = TargetIdentity("tiny/target", "a" * 64, "b" * 64, "c" * 64, 100, [0])
    write_record(directory, ExportRecord("hf-causal-lm", "draft_model", target, True, 1, 1, {}, {}, []))
    return directory


def content_of(version: Path) -> str:
    """What `make_export` was given, from a published version."""
    data = (version / "model.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :].decode()


def publish(registry: Registry, content: str, expected: str | None, **tags: str) -> str:
    """Publish an export whose digest depends on `content`."""
    work = registry.root.parent / f"run-{content}"
    export = work / "export" if work.exists() else make_export(work / "export", content)
    files = {}
    for name in ("report.json", "gate.json"):
        files[name] = work / name
        files[name].write_text(json.dumps({"of": content}))
    return registry.publish(export, files=files, tags=tags, expected_champion=expected)


def run_sql(root: Path, statement: str) -> None:
    connection = sqlite3.connect(root / "mlflow.db")
    with connection:
        connection.execute(statement)
    connection.close()


def version_directories(registry: Registry) -> list[str]:
    return sorted(path.name for path in (registry.directory / "versions").iterdir())


def raise_after(owner: object, name: str, monkeypatch: pytest.MonkeyPatch, *, about: str = "") -> None:
    """A kill after the first call whose arguments say `about`."""
    original = getattr(owner, name)

    def call_then_die(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)
        if about in str(args):
            raise Killed

    monkeypatch.setattr(owner, name, call_then_die)
