"""The registry's record in MLflow: public bug cases G1 to G8, processes that start together, lost and moved records."""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import bound_by_permissions
from registry_factory import (  # noqa: F401
    MODEL,
    content_of,
    empty_database,
    make_export,
    publish,
    registry,
    root,
    run_sql,
    version_directories,
)
from test_callbacks import make_trainer

from specdist.errors import ArtifactError
from specdist.registry import store
from specdist.registry.mlflow import open_record, remedy
from specdist.registry.place import check_writable
from specdist.registry.store import Registry
from specdist.training.callbacks import CheckpointAcceptance, MetricsFile, run_training

# ruff: noqa: F811  (fixtures are arguments of the names that are imported)


def test_g1_champion_is_asked_through_the_alias_call(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry, "a", None)
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    get_model = SqlAlchemyStore.get_registered_model
    search = SqlAlchemyStore.search_model_versions

    def without_aliases(self: SqlAlchemyStore, name: str) -> SimpleNamespace:
        get_model(self, name)
        return SimpleNamespace(name=name, aliases={}, latest_versions=[])

    def search_and_look(self: SqlAlchemyStore, *args: Any, **kwargs: Any) -> object:
        page = search(self, *args, **kwargs)
        assert all(not item.aliases for item in page)  # the defect of the case: lists carry no aliases
        return page

    monkeypatch.setattr(SqlAlchemyStore, "get_registered_model", without_aliases)
    monkeypatch.setattr(SqlAlchemyStore, "search_model_versions", search_and_look)
    champion = registry.champion()
    assert champion is not None
    assert champion.number == "1"


def test_g2_version_numbers_are_strings_whatever_comes_in(registry: Registry) -> None:
    publish(registry, "a", None)
    assert publish(registry, "b", 1) == "2"  # type: ignore[arg-type]
    assert registry.get(1) == registry.get("1")
    assert registry.rollback(1).number == "1"
    with open_record(registry.root / "mlflow.db", MODEL) as record:
        assert record.champion() == "1"
        assert list(record.versions()) == ["1", "2"]


@pytest.mark.parametrize("gone", ["record", "record and alias", "directory"])
def test_g3_champion_that_points_to_a_missing_version_is_not_no_champion(registry: Registry, gone: str) -> None:
    publish(registry, "a", None)
    publish(registry, "b", "1")
    if gone == "directory":
        shutil.rmtree(registry.directory / "versions" / "2")
        message = "points to missing version.*directory is missing.*rollback"
    else:
        run_sql(registry.root, "UPDATE model_versions SET current_stage = 'Deleted_Internal' WHERE version = 2")
        message = r"points to missing version.*version=2.*not found.*rollback"
    if gone == "record and alias":
        run_sql(registry.root, "DELETE FROM registered_model_aliases")
        message = r"serves version 2, but the record names no champion"

    with pytest.raises(ArtifactError, match=message):
        registry.champion()
    for expected in (None, "1", "2"):
        with pytest.raises(ArtifactError, match=message):
            publish(registry, "c", expected)
    assert registry.versions()[0].number == "1"

    assert registry.rollback().number == "1"
    champion = registry.champion()
    assert champion is not None
    assert champion.number == "1"
    assert publish(registry, "c", "1") == "3"  # 2 is not used again
    assert publish(registry, "b", "3") == "4"  # what is missing counts as not published


def test_a_lost_record_is_rebuilt_from_the_directories(registry: Registry) -> None:
    for content, expected in (("a", None), ("b", "1"), ("c", "2")):
        publish(registry, content, expected, mean_accepted_length=content)
    shutil.rmtree(registry.directory / "versions" / "2")
    (registry.root / "mlflow.db").write_bytes(empty_database())
    with pytest.raises(ArtifactError, match=r"serves version 3, but the record names no champion.*--to 3"):
        registry.champion()
    assert registry.rollback("3").number == "3"
    assert [(v.number, v.tags["mean_accepted_length"]) for v in registry.versions()] == [("1", "a"), ("3", "c")]
    assert publish(registry, "d", "3") == "4"


# Publishes each export named on the command line in a process of its own; all start together.
SCRIPT = """
import logging, multiprocessing, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from specdist.errors import ArtifactError
from specdist.registry import mlflow, store
mlflow._store_class()  # the slow import, once for all
root = Path(sys.argv[1])

def work(name):
    registry = store.Registry(root, "tiny-draft")
    while True:
        champion = registry.champion()
        expected = champion and champion.number
        try:
            number = registry.publish(root.parent / name, files={}, tags={"run": name}, expected_champion=expected)
        except ArtifactError as error:
            assert "the gate judged against" in str(error), error
        else:
            return print(name, number, flush=True)

processes = [multiprocessing.get_context("fork").Process(target=work, args=(name,)) for name in sys.argv[2:]]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(process.exitcode for process in processes))
"""


def run_processes(root: Path, *names: str, before: str = "") -> subprocess.CompletedProcess[str]:
    for name in names:
        make_export(root.parent / name, name)
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", before + SCRIPT, str(root), *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=root.parent, env=environment, timeout=120)


def test_g4_g7_processes_that_start_a_registry_together_get_their_own_versions(tmp_path: Path) -> None:
    root = tmp_path / "registry"
    result = run_processes(root, "a", "b", "c", "d")
    assert result.returncode == 0, result.stderr

    registry = Registry(root, MODEL)
    numbers = dict(line.split() for line in result.stdout.splitlines())
    assert sorted(numbers) == ["a", "b", "c", "d"]
    assert sorted(numbers.values()) == ["1", "2", "3", "4"]
    for name, number in numbers.items():
        assert registry.get(number).tags["run"] == name
        assert content_of(registry.get(number).path) == name
    champion = registry.champion()
    assert champion is not None
    assert champion.number == "4" == registry.history()[-1]["version"]
    # No experiment directory in the working directory, no migration lines for the user.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d", "registry"]
    assert [line for line in result.stderr.splitlines() if "specdist.registry" not in line] == []


def test_a_process_killed_while_it_holds_the_lock(registry: Registry) -> None:
    die = "from specdist.registry import store; import os; store.seal = lambda *_: os._exit(9)\n"
    assert run_processes(registry.root, "a", before=die).returncode == 9
    assert [name[:5] for name in version_directories(registry)] == [".tmp-"]
    assert registry.champion() is None
    assert publish(registry, "a", None) == "1"
    assert version_directories(registry) == ["1"]


def test_g7_a_metric_that_is_logged_twice_at_one_step_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a checkpoint that a resumed run tells of once more."""
    database, acceptance = tmp_path / "team.db", {"acceptance/mean_accepted_length": 1.5}
    database.write_bytes(empty_database())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    trainer = make_trainer(tmp_path, max_steps=1, report_to=["mlflow"])
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    run_training(trainer, resume_from=None, callbacks=[metrics, CheckpointAcceptance(lambda _: acceptance, dict)])
    trainer.log(acceptance)
    mlflow = importlib.import_module("mlflow")
    run_id = mlflow.active_run().info.run_id
    mlflow.end_run()
    history = mlflow.MlflowClient(f"sqlite:///{database}").get_metric_history(run_id, next(iter(acceptance)))
    assert {(metric.step, metric.value) for metric in history} == {(1, 1.5)}
    assert len(metrics.keep_until(1)) == 4, "loss, twice the acceptance, the trainer's summary"


def test_g5_a_moved_registry_goes_on(registry: Registry, tmp_path: Path) -> None:
    publish(registry, "a", None)
    moved = Registry(tmp_path / "elsewhere" / "new place #1", MODEL)
    moved.root.parent.mkdir()
    registry.root.rename(moved.root)
    champion = moved.champion()
    assert champion is not None
    assert champion.path == moved.champion_path().resolve() == moved.root / MODEL / "versions" / "1"
    moved.verify(champion)
    assert publish(moved, "b", "1") == "2"
    assert moved.rollback().number == "1"
    database = (moved.root / "mlflow.db").read_bytes()
    assert str(tmp_path).encode() not in database


def test_g8_a_registry_that_cannot_be_written_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "new" / "registry")
    check_writable(tmp_path / "new" / "registry", needed_bytes=1)
    with pytest.raises(ArtifactError, match=r"registry: .* bytes free, the registry needs"):
        check_writable(tmp_path / "new" / "registry", needed_bytes=2**60)

    occupied = tmp_path / "occupied"
    occupied.write_text("a file in place of the directory")
    with pytest.raises(ArtifactError, match=f"{occupied}: the registry cannot be written"):
        check_writable(occupied)
    with pytest.raises(ArtifactError, match=f"{occupied}: the registry cannot be written"):
        publish(Registry(occupied, MODEL), "a", None)

    def disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "symlink", no_links)
        with pytest.raises(ArtifactError, match=r"new: no symbolic link can be made here .*another file system"):
            check_writable(tmp_path / "new")
        with pytest.raises(ArtifactError, match="no symbolic link"):
            publish(Registry(tmp_path / "new", MODEL), "a", None)
    assert not (tmp_path / "new" / MODEL).exists(), "nothing is published that no link can name"
    assert not list(tmp_path.rglob(".tmp-*"))

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", disk_full)
        with pytest.raises(ArtifactError, match=r"new: the registry cannot be written .*No space left"):
            check_writable(tmp_path / "new")


def test_g8_a_read_only_registry_can_be_read_but_not_written() -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are below one that only its user may enter
        Path(directory).chmod(0o755)
        registry = Registry(Path(directory) / "registry", MODEL)
        registry.root.mkdir()
        (registry.root / "mlflow.db").write_bytes(empty_database())
        publish(registry, "a", None)
        registry.root.chmod(0o555)
        with bound_by_permissions():
            assert registry.champion() is not None
            with pytest.raises(
                ArtifactError, match=f"{registry.root}: the registry cannot be written.*Permission denied"
            ):
                check_writable(registry.root)
        registry.root.chmod(0o755)


def test_a_database_that_is_none_is_reported_at_once(registry: Registry) -> None:
    (registry.root / "mlflow.db").write_text("something else")
    with pytest.raises(ArtifactError, match=r"mlflow\.db: not an sqlite database"):
        registry.champion()
    (registry.root / "mlflow.db").write_bytes(b"SQLite format 3\x00" + b"broken" * 200)
    with pytest.raises(ArtifactError, match=r"mlflow\.db: the record failed"):
        registry.champion()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("(sqlite3.OperationalError) database is locked", "another program holds it"),
        ("(sqlite3.OperationalError) disk I/O error", "free space"),
        ("(sqlite3.OperationalError) database or disk is full", "free space"),
        ("Detected out-of-date database schema", "mlflow db upgrade"),
    ],
)
def test_an_error_of_the_record_says_what_to_do(reason: str, words: str) -> None:
    assert words in remedy(Path("mlflow.db"), reason)
