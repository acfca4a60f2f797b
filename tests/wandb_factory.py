"""Owns what tests of W&B share: a clean environment, broken servers, and what offline run files hold."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from scripts.benchmark_tracking import hanging_server, refusing_url

__all__ = ["NAMES", "OfflineRun", "clean", "hanging_server", "read_runs", "refusing_url"]

NAMES = tuple(
    f"WANDB_{name}"
    for name in ("MODE", "PROJECT", "DIR", "RUN_GROUP", "RUN_ID", "API_KEY", "SILENT", "INIT_TIMEOUT", "FINISH_TIMEOUT")
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no choice of the user's, no home."""
    for name in (*NAMES, "WANDB_BASE_URL"):
        monkeypatch.setenv(name, "")  # so that the test's own changes are undone as well
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")  # asks git several times at each start


@dataclass
class OfflineRun:
    """What a .wandb file holds: the run, its logged rows, its step metrics, and its artifacts by type."""

    id: str = ""
    group: str = ""
    project: str = ""
    history: list[dict] = field(default_factory=list)
    step_metrics: set[str] = field(default_factory=set)
    artifacts: dict[str, tuple[str, list[str], dict]] = field(default_factory=dict)
    finished: bool = False


def read_runs(directory: Path) -> list[OfflineRun]:
    """The offline runs below a W&B directory, oldest first. wandb closes a finished run's file a little later."""
    runs, files = [], sorted(directory.glob("offline-run-*/*.wandb"))
    for file in files:
        end = time.monotonic() + 20
        while not (run := _read_run(file)).finished and time.monotonic() < end:
            time.sleep(0.02)
        runs.append(run)
    return runs


def _read_run(file: Path) -> OfflineRun:
    run = OfflineRun()
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.group, run.project = record.run.run_id, record.run.run_group, record.run.project
        elif kind == "history":
            items = record.history.item
            run.history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind == "metric":
            run.step_metrics.add(record.metric.step_metric or record.metric.name)
        elif kind == "exit":
            run.finished = True
        elif kind == "artifact":
            files = sorted(entry.path for entry in record.artifact.manifest.contents)
            run.artifacts[record.artifact.type] = (
                record.artifact.name,
                files,
                json.loads(record.artifact.metadata or "{}"),
            )
    return run


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: 7 bytes of W&B's own, then blocks of 32 KiB of (CRC, length, type, data)."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
