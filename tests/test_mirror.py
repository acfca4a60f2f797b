"""Another MLflow is told what the registry holds, by its URI; one that refuses or hangs changes nothing that serves."""

import time
from pathlib import Path

import pytest
from registry_factory import (  # noqa: F401
    MODEL,
    empty_database,
    make_export,
    publish,
    registry,
    root,
)
from wandb_factory import hanging_server, refusing_url

from specdist import cli
from specdist.errors import ArtifactError
from specdist.registry.mirror import URI_VARIABLE, mirror, mirror_uri, tell
from specdist.registry.mlflow import open_record
from specdist.registry.store import Registry

# ruff: noqa: F811  (fixtures are arguments of the names that are imported)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The database of another MLflow."""
    database = tmp_path / "elsewhere" / "team.db"
    database.parent.mkdir()
    database.write_bytes(empty_database())
    return database


def told(database: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Number of ours by number of theirs, and their aliases."""
    with open_record(database, MODEL) as record:
        return {number: tags["specdist_version"] for number, tags in record.versions().items()}, record.aliases()


def test_g2_every_version_and_alias_is_told_once_and_follows(registry: Registry, elsewhere: Path) -> None:
    uri = f"sqlite:///{elsewhere}"
    publish(registry, "a", None, mean_accepted_length="1.5")
    mirror(registry, uri)
    assert told(elsewhere) == ({"1": "1"}, {"champion": "1"})
    publish(registry, "b", "1")
    registry.challenge(make_export(registry.root.parent / "c", "c"), files={}, tags={})
    for _ in range(2):
        mirror(registry, uri)
        assert told(elsewhere) == ({"1": "1", "2": "2", "3": "3"}, {"champion": "2", "challenger": "3"})
    registry.rollback()
    assert publish(registry, "c", "1") == "4", "the challenger, promoted with the evidence of that"
    mirror(registry, uri)
    assert told(elsewhere)[1] == {"champion": "4"}
    with open_record(elsewhere, MODEL) as record:
        assert record.versions()["1"]["mean_accepted_length"] == "1.5"


def test_an_mlflow_that_refuses_or_hangs_is_given_up_and_reconcile_tells_it_later(
    registry: Registry, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(registry, "a", None)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ArtifactError, match=r"127\.0\.0\.1.*[Cc]onnection"):
        mirror(registry, refusing_url())
    with hanging_server(alive=False) as url:
        begin = time.monotonic()
        assert tell(registry, url, seconds=0.5) == "not done after 0.5 s"
        assert time.monotonic() - begin < 20
    assert registry.champion_path().resolve().name == "1"

    monkeypatch.setenv(URI_VARIABLE, f"sqlite:///{elsewhere}")
    assert cli.main(["registry", "reconcile", MODEL, "--root", str(registry.root)]) == 0
    assert f"MLflow at sqlite:///{elsewhere} is up to date" in capsys.readouterr().out
    assert told(elsewhere) == ({"1": "1"}, {"champion": "1"})


def test_what_is_configured_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URI_VARIABLE, raising=False)
    assert mirror_uri() is None
    monkeypatch.setenv(URI_VARIABLE, "http://team:5000")
    assert mirror_uri() == "http://team:5000"
    assert mirror_uri("sqlite:///mine.db") == "sqlite:///mine.db"
