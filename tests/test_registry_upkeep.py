"""What a registry keeps and deletes: pruning, the challenger, and what a read-only or a moved store does to them."""

import os
import shutil
from pathlib import Path

import pytest
from registry_factory import (
    MODEL,
    Killed,
    content_of,
    empty_database,
    make_export,
    publish,
    raise_after,
    run_sql,
    version_directories,
)

from specdist.errors import ArtifactError, ConfigError
from specdist.registry import store
from specdist.registry.attempts import count_attempt
from specdist.registry.mlflow import ModelRecord, open_record
from specdist.registry.store import Registry


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry of five versions, the last of which is champion. Read only: `five` is a copy."""
    root = tmp_path_factory.mktemp("made") / "registry"
    root.mkdir()
    (root / "mlflow.db").write_bytes(empty_database())
    for i, content in enumerate("abcde"):
        publish(Registry(root, MODEL), content, str(i) if i else None)
    return root


@pytest.fixture
def five(made: Path, tmp_path: Path) -> Registry:
    return Registry(Path(shutil.copytree(made, tmp_path / "registry", symlinks=True)), MODEL)


def numbers(registry: Registry) -> list[str]:
    return [version.number for version in registry.versions()]


def test_prune_keeps_the_newest_and_the_one_to_go_back_to(five: Registry) -> None:
    assert five.prune(1) == ["1", "2", "3"]
    assert numbers(five) == version_directories(five) == ["4", "5"]
    assert five.rollback().number == "4"
    assert five.prune(0) == ["5"], "a rollback took it off the pile"
    assert publish(five, "f", "4") == "6", "no number is given twice"


def test_prune_never_deletes_what_an_alias_or_a_link_names(five: Registry) -> None:
    five.rollback("2")
    run_sql(five.root, "INSERT INTO registered_model_aliases (name, alias, version) VALUES ('tiny-draft', 'shadow', 3)")
    (five.directory / "aliases" / "canary").symlink_to("../versions/4")
    five.challenge(make_export(five.root.parent / "challenger", "z"), files={}, tags={})
    assert five.prune(0) == ["5"]
    assert numbers(five) == ["1", "2", "3", "4", "6"]
    champion = five.champion()
    assert champion is not None
    assert champion.number == "2"
    assert content_of(five.champion_path()) == "b"
    for version in five.versions():
        five.verify(version)


def test_a_negative_number_to_keep_is_refused(five: Registry) -> None:
    with pytest.raises(ConfigError, match="keep -1"):
        five.prune(-1)
    assert len(numbers(five)) == 5


@pytest.mark.parametrize(
    ("owner", "name"), [(ModelRecord, "delete"), (store.os, "rename"), (store.shutil, "rmtree")], ids=str
)
def test_an_interrupted_prune_is_completed(
    five: Registry, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    with monkeypatch.context() as patch:
        raise_after(owner, name, patch)
        with pytest.raises(Killed):
            five.prune(1)
    five.reconcile()
    assert set(numbers(five)) >= {"2", "3", "4", "5"}
    five.prune(1)
    assert numbers(five) == version_directories(five) == ["4", "5"]
    assert not list(five.root.rglob(".tmp-*"))


def test_a_challenger_changes_nothing_that_serves(five: Registry) -> None:
    export = make_export(five.root.parent / "challenger", "z")
    assert five.challenge(export, files={}, tags={"of": "z"}) == "6"
    assert five.challenge(export, files={}, tags={}) == "6", "repeating it changes nothing"
    challenger = five.challenger()
    assert challenger is not None
    assert challenger.tags["of"] == "z"
    assert os.readlink(five.directory / "aliases" / "challenger") == "../versions/6"
    assert os.readlink(five.champion_path()) == "../versions/5"
    with pytest.raises(ArtifactError, match="version 6 never was champion"):
        five.rollback("6")


def test_a_challenger_that_is_promoted_becomes_a_version_with_its_new_evidence(five: Registry) -> None:
    export = make_export(five.root.parent / "challenger", "z")
    five.challenge(export, files={}, tags={})
    (gate := five.root.parent / "gate.json").write_text('{"verdict": "promote"}')
    assert five.publish(export, files={"gate.json": gate}, tags={}, expected_champion="5") == "7"
    assert (five.champion_path() / "gate.json").is_file()
    assert five.challenger() is None
    assert not (five.directory / "aliases" / "challenger").is_symlink()


@pytest.mark.parametrize(("owner", "name"), [(ModelRecord, "set_alias"), (store.os, "rename")], ids=str)
def test_a_killed_challenge_is_completed(
    five: Registry, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    export = make_export(five.root.parent / "challenger", "z")
    with monkeypatch.context() as patch:
        raise_after(owner, name, patch)
        with pytest.raises(Killed):
            five.challenge(export, files={}, tags={})
    five.reconcile()
    challenger, link = five.challenger(), five.directory / "aliases" / "challenger"
    assert link.is_symlink() == (challenger is not None)
    assert five.challenge(export, files={}, tags={}) == "6"
    assert os.readlink(link) == "../versions/6"


def test_g1_aliases_are_read_whoever_set_them(five: Registry) -> None:
    with open_record(five.root / "mlflow.db", five.model_name) as record:
        record.set_alias("shadow", "2")
        assert record.aliases() == {"champion": "5", "shadow": "2"}
        record.delete_alias("shadow")
        assert record.aliases() == {"champion": "5"}


def test_attempts_are_counted_by_prompts_and_drafter(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry", MODEL)

    def attempt(prompts: str, drafter: str) -> int:
        return count_attempt(registry, eval_prompts_sha256=prompts, drafter_sha256=drafter)

    assert [attempt("p", d) for d in "aabcb"] == [1, 1, 2, 3, 3]
    assert attempt("q", "a") == 1
    file = registry.directory / "attempts.jsonl"
    file.write_text(file.read_text() + "{half a li")
    with pytest.raises(ArtifactError, match=r"attempts\.jsonl: attempts cannot be counted"):
        attempt("p", "d")


def test_what_is_moved_is_pruned_where_it_lies(five: Registry, tmp_path: Path) -> None:
    moved = Registry(tmp_path / "elsewhere", five.model_name)
    five.root.rename(moved.root)
    assert moved.prune(0) == ["1", "2", "3"]
    assert content_of(moved.champion_path()) == "e"
