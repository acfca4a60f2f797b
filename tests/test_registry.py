"""The registry: publishing whole or not at all, one champion, rolling back."""

import os
from pathlib import Path

import pytest
from registry_factory import (  # noqa: F401
    MODEL,
    Killed,
    content_of,
    make_export,
    publish,
    raise_after,
    registry,
    root,
    run_sql,
    version_directories,
)

from specdist import provenance
from specdist.errors import ArtifactError, ConfigError
from specdist.registry import store
from specdist.registry.history import History
from specdist.registry.mlflow import ModelRecord
from specdist.registry.store import Registry

# ruff: noqa: F811  (fixtures are arguments of the names that are imported)

# Publishing


def test_publish_writes_what_an_engine_reads(registry: Registry) -> None:
    assert publish(registry, "a", None, mean_accepted_length="2.31") == "1"

    served = registry.champion_path()
    assert served == registry.root / MODEL / "aliases" / "champion"
    assert os.readlink(served) == "../versions/1"
    assert {path.relative_to(served).as_posix() for path in served.rglob("*") if path.is_file()} == {
        "config.json", "model.safetensors", "extra/notes.txt", "export.json", "report.json", "gate.json",
        "version.json",
    }  # fmt: skip
    assert content_of(served) == "a"
    assert all(not path.stat().st_mode & 0o222 for path in served.rglob("*") if path.is_file())

    champion = registry.champion()
    assert champion is not None
    assert champion.number == "1"
    assert champion.path == served.resolve()
    assert champion.digest == provenance.sha256_tree(registry.root.parent / "run-a" / "export")
    assert champion.tags["mean_accepted_length"] == "2.31"
    assert registry.versions() == [champion]
    registry.verify(champion)


def test_nothing_is_written_by_reading(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry", MODEL)
    assert registry.champion() is None
    assert registry.versions() == []
    with pytest.raises(ArtifactError, match=f"{MODEL}: no version 1"):
        registry.get(1)
    with pytest.raises(ArtifactError, match="no champion"):
        registry.champion_path()
    assert list(tmp_path.iterdir()) == []


def test_a_gate_that_judged_against_another_champion_is_refused(registry: Registry) -> None:
    publish(registry, "a", None)
    with pytest.raises(ArtifactError, match="champion is 1, but the gate judged against None"):
        publish(registry, "b", None)
    with pytest.raises(ArtifactError, match="champion is 1, but the gate judged against 7"):
        publish(registry, "b", "7")
    assert version_directories(registry) == ["1"]
    assert publish(registry, "b", "1") == "2"
    assert os.readlink(registry.champion_path()) == "../versions/2"


def test_champion_moved_by_another_tool_while_copying_is_seen(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(registry, "a", None)
    publish(registry, "b", "1")

    def move_alias(directory: Path, manifest: dict[str, object]) -> None:
        seal(directory, manifest)
        run_sql(registry.root, "UPDATE registered_model_aliases SET version = 1")

    seal = store.seal
    monkeypatch.setattr(store, "seal", move_alias)
    with pytest.raises(ArtifactError, match="champion is 1, but the gate judged against 2"):
        publish(registry, "c", "2")


def test_publishing_the_same_export_again_changes_nothing(registry: Registry) -> None:
    publish(registry, "a", None)
    publish(registry, "b", "1")
    assert publish(registry, "b", "1") == "2"
    assert version_directories(registry) == ["1", "2"]
    assert [entry["version"] for entry in registry.history()] == ["1", "2"]


def test_an_older_version_can_win_again(registry: Registry) -> None:
    publish(registry, "a", None, mean_accepted_length="2.0")
    publish(registry, "b", "1")
    assert publish(registry, "a", "2", mean_accepted_length="2.5") == "1"
    assert version_directories(registry) == ["1", "2"]
    assert registry.get("1").tags["mean_accepted_length"] == "2.5"
    assert registry.rollback().number == "2"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(store, "copy_files", id="after copying"),
        pytest.param(store, "seal", id="after sealing"),
        pytest.param(store.os, "rename", id="after the rename"),
        pytest.param(ModelRecord, "create", id="after the record"),
        pytest.param(ModelRecord, "set_champion", id="after the alias"),
        pytest.param(History, "append", id="after the history"),
        pytest.param(store.os, "symlink", id="after a temporary link"),
    ],
)
@pytest.mark.parametrize("repeat", [True, False], ids=["repeated", "another export next"])
def test_a_killed_publication_is_completed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, repeat: bool
) -> None:
    publish(registry, "a", None)
    with monkeypatch.context() as patch:
        # Before it writes, it tries whether links can be made: that one is not meant
        raise_after(owner, name, patch, about="versions" if name == "symlink" else "")
        with pytest.raises(Killed):
            publish(registry, "b", "1")
    assert content_of(registry.champion_path()) == "a"  # serving goes on

    committed = name in ("set_champion", "append", "symlink")
    recorded = committed or name in ("create", "rename")
    if repeat:
        assert publish(registry, "b", "1") == "2"
        numbers = ["1", "2"]
    else:
        numbers = ["1", "2", "3"] if recorded else ["1", "2"]
        assert publish(registry, "c", "2" if committed else "1") == numbers[-1]
    assert version_directories(registry) == numbers
    assert [version.number for version in registry.versions()] == numbers
    champion = registry.champion()
    assert champion is not None
    assert champion.number == numbers[-1] == registry.history()[-1]["version"]
    assert registry.champion_path().resolve() == champion.path
    assert not list(registry.root.rglob(".tmp-*"))
    for version in registry.versions():
        registry.verify(version)


def test_first_publication_killed_after_the_alias(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        raise_after(ModelRecord, "set_champion", patch)
        with pytest.raises(Killed):
            publish(registry, "a", None)
    registry.reconcile()
    assert os.readlink(registry.champion_path()) == "../versions/1"
    assert [entry["action"] for entry in registry.history()] == ["repair"]
    assert publish(registry, "a", None) == "1"


def test_a_failed_copy_leaves_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "seal", disk_full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        publish(registry, "a", None)
    assert version_directories(registry) == []
    assert registry.champion() is None


def test_an_export_that_changes_while_it_is_copied_is_refused(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_then_copy(sources: dict[str, Path], hashes: dict[str, str], directory: Path) -> None:
        sources["model.safetensors"].write_text("changed")
        copy_files(sources, hashes, directory)

    copy_files = store.copy_files
    monkeypatch.setattr(store, "copy_files", change_then_copy)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: differs from"):
        publish(registry, "a", None)
    assert registry.versions() == []


def test_bad_sources_are_refused_before_anything_is_written(registry: Registry, tmp_path: Path) -> None:
    export = make_export(tmp_path / "export", "a")
    report = tmp_path / "report.json"

    def attempt(files: dict[str, Path], tags: dict[str, str] | None = None, directory: Path = export) -> None:
        registry.publish(directory, files=files, tags=tags or {}, expected_champion=None)

    with pytest.raises(ArtifactError, match=r"export\.json: no such file"):
        attempt({}, directory=tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"report.json.*no such file"):
        attempt({"report.json": report})
    report.write_text("{}")
    with pytest.raises(ArtifactError, match=r"config.json.*written twice"):
        attempt({"config.json": report})
    with pytest.raises(ArtifactError, match=r"version.json.*written twice"):
        attempt({"version.json": report})
    with pytest.raises(ConfigError, match="plain file names"):
        attempt({"../report.json": report})
    with pytest.raises(ConfigError, match="digest"):
        attempt({}, tags={"digest": "mine"})
    assert not registry.directory.exists()


@pytest.mark.parametrize(
    "name", ["my-Eagle-draft", "qwen-eagle3", "dflash", "x-DSpark", "", "a/b", "..", ".tmp-x", "a b"]
)
def test_names_that_an_engine_or_a_file_system_misreads_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"model name|model another name"):
        Registry(tmp_path, name)


def test_a_root_that_an_engine_misreads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Eagle-team/registry/tiny-draft: vLLM misreads .*'eagle-'"):
        Registry(tmp_path / "Eagle-team" / "registry", MODEL)


def test_a_root_that_no_uri_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="%"):
        Registry(tmp_path / "100%", MODEL)


# Rolling back


def test_rollback_goes_down_the_pile_of_champions(registry: Registry) -> None:
    for content, expected in (("a", None), ("b", "1"), ("c", "2")):
        publish(registry, content, expected)
    assert registry.rollback().number == "2"
    assert os.readlink(registry.champion_path()) == "../versions/2"
    assert registry.rollback().number == "1"
    with pytest.raises(ArtifactError, match="no earlier champion"):
        registry.rollback()
    assert registry.rollback(3).number == "3"
    champion = registry.champion()
    assert champion is not None
    assert champion.number == "3"
    assert [entry["action"] for entry in registry.history()] == ["publish"] * 3 + ["rollback"] * 3


def test_rollback_lets_nothing_in_that_the_gate_has_not(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry, "a", None)
    with monkeypatch.context() as patch:
        raise_after(ModelRecord, "create", patch)
        with pytest.raises(Killed):
            publish(registry, "b", "1")
    with pytest.raises(ArtifactError, match="version 2 never was champion"):
        registry.rollback("2")
    with pytest.raises(ArtifactError, match=r"no version 9 .* there are \['1', '2'\]"):
        registry.rollback("9")


@pytest.mark.parametrize("change", ["alter", "add", "remove", "manifest"])
def test_a_tampered_version_is_found_and_not_rolled_back_to(registry: Registry, change: str) -> None:
    publish(registry, "a", None)
    publish(registry, "b", "1")
    version = registry.get(1)
    name = {"alter": "model.safetensors", "add": "new.bin", "remove": "config.json", "manifest": "version.json"}[change]
    path = version.path / name
    path.unlink(missing_ok=True)
    if change != "remove":
        path.write_text("{}")
    with pytest.raises(ArtifactError, match=name):
        registry.verify(version)
    with pytest.raises(ArtifactError, match=name):
        registry.rollback()
    assert os.readlink(registry.champion_path()) == "../versions/2"
