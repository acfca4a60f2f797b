"""A few of the faults and one of the races of scripts/stress_registry.py, which makes hundreds."""

from pathlib import Path

import pytest
from registry_factory import empty_database

from scripts import stress_registry


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a registry is made: its migrated database lies there already."""
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "mlflow.db").write_bytes(empty_database())
    return tmp_path


def test_faults_leave_a_champion_that_serves(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_registry, "_LOCKED_SECONDS", (0.3,))
    tally = stress_registry.inject(5, seed=1, directory=directory)
    assert tally.failures == []
    assert len(tally.injected) == 5, "each kind once, on promotions and rollbacks in turn"


def test_g4_processes_that_promote_at_once_lose_nothing(directory: Path) -> None:
    faults, _ = stress_registry.race(processes=4, rounds=1, directory=directory)
    assert faults == []


def test_a_registry_that_serves_what_no_gate_passed_is_found(directory: Path) -> None:
    registry = stress_registry.Registry(directory / "registry", stress_registry.MODEL)
    export = stress_registry.make_export(directory, "first", 0)
    (directory / "first" / "gate.json").write_text('{"verdict": "hold"}')
    stress_registry.publish(registry, export, None)
    with pytest.raises(AssertionError):
        stress_registry.check_serving(registry, {"1"})
    (registry.directory / "aliases" / "champion").unlink()
    with pytest.raises(AssertionError, match="no champion link"):
        stress_registry.check_serving(registry, {"1"})
