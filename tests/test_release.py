"""The end of a run: judged, published, judged again where another champion came first; attempts are counted."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from heads_factory import export_heads, make_heads
from huggingface_hub import ModelCard
from registry_factory import Killed, empty_database, raise_after
from report_factory import make_report as make_full_report
from test_run import begin

from specdist import cli
from specdist.drafter_config import HYDRA, MEDUSA, OWN
from specdist.evaluation.report import REPORT_FILE, read_report
from specdist.export_record import read_record
from specdist.provenance import write_json
from specdist.registry.history import History
from specdist.registry.mlflow import ModelRecord
from specdist.registry.store import Registry
from specdist.schema import EvalReport
from specdist.stages.release import export_faults, read_release, release
from specdist.stages.run import Run

make_report = partial(make_full_report, gammas=(3,), settings=("greedy",), per_domain=10)


@pytest.fixture
def run(tiny_target_dir: Path, tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "mlflow.db").write_bytes(empty_database())
    run = begin(tmp_path, tiny_target_dir)
    assert run is not None
    yield run
    run.lock.release()


def measured(run: Run, strength: float, seed: int = 1, kind: str = MEDUSA) -> EvalReport:
    """An export of its own in the run's directory, and a report of this strength on it."""
    record = export_heads(run.target, run.export, make_heads(projection=OWN, seed=seed, kind=kind))
    report = replace(make_report(strength), target=run.target.identity, drafter_sha256=record.drafter_sha256)
    write_json(run.directory / REPORT_FILE, report.to_json())
    return report


def publish_rival(run: Run, directory: Path, strength: float) -> None:
    """What another process publishes in the same registry."""
    record = export_heads(run.target, directory / "export", make_heads(projection=OWN, seed=99))
    report = replace(make_report(strength), target=run.target.identity, drafter_sha256=record.drafter_sha256)
    write_json(directory / REPORT_FILE, report.to_json())
    (directory / "gate.json").write_text("{}")
    registry = Registry(run.registry.root, run.registry.model_name)
    champion = registry.champion()
    registry.publish(
        directory / "export",
        files={name: directory / name for name in ("report.json", "gate.json")},
        tags={},
        expected_champion=champion and champion.number,
    )


def attempts(run: Run) -> float | None:
    """Drafters judged on the evaluation prompts, as the last decision shows them."""
    _, decision = read_release(run.directory)
    assert decision is not None
    return next(check.observed for check in decision.checks if check.name == "evaluation_attempts")


@pytest.mark.parametrize("kind", [MEDUSA, HYDRA])
def test_what_is_said_of_serving_is_what_can_serve(run: Run, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with caplog.at_level("INFO", logger="specdist"):
        assert release(run, measured(run, 1.0, kind=kind)) == 0
    (said,) = [m for m in caplog.messages if " serve" in m and str(run.registry.champion_path()) in m]
    command = shlex.split(said.partition(": ")[2])
    if kind == HYDRA:
        assert "no engine serves" in said
        known = cli._parser().parse_args(command[1:])
        assert (known.target, known.drafter) == (str(run.target.path), str(run.registry.champion_path()))
    else:
        assert command[:3] == ["vllm", "serve", str(run.target.path)]
        config = json.loads(command[command.index("--speculative-config") + 1])
        assert config == {"method": "medusa", "model": str(run.registry.champion_path()), "num_speculative_tokens": 3}


def test_a_promoted_drafter_serves_a_held_one_is_challenger_and_both_are_counted(run: Run) -> None:
    first = measured(run, 1.0)
    assert release(run, first) == 0
    champion = run.registry.champion()
    assert champion is not None
    assert (champion.number, run.registry.challenger(), attempts(run)) == ("1", None, 1)
    card = ModelCard.load(run.registry.champion_path() / "README.md")
    assert "**Verdict: promote**" in card.text
    assert card.data.model_name == run.config.release.model_name
    assert read_record(run.registry.champion_path()).drafter_sha256 == first.drafter_sha256, "the card lies beside"
    assert release(run, first) == 0, "repeated, it keeps its verdict"
    assert attempts(run) == 1
    held = measured(run, 1.0, seed=2)  # the same strength: no difference to be shown
    assert release(run, held) == 3
    assert attempts(run) == 2
    challenger = run.registry.challenger()
    assert challenger is not None
    assert challenger.number == "2"
    assert read_report(challenger.path) == held
    assert json.loads((challenger.path / "gate.json").read_text())["verdict"] == "hold"
    assert run.registry.champion() == champion
    assert run.registry.champion_path().resolve() == champion.path


@pytest.mark.parametrize(
    ("first", "owner", "name"),
    [(True, ModelRecord, "set_champion"), (False, History, "append")],
    ids=["the first champion, after the alias", "the second, after the history"],
)
def test_a_run_that_was_killed_while_it_published_is_finished_by_repeating_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, owner: type, name: str
) -> None:
    if not first:
        publish_rival(run, tmp_path / "rival", 0.9)
    report, number = measured(run, 1.2), "1" if first else "2"
    with monkeypatch.context() as patch:
        raise_after(owner, name, patch)
        with pytest.raises(Killed):
            release(run, report)
    verdict = (run.directory / "gate.json").read_text()
    assert release(run, report) == 0, "it is not judged against itself"
    assert (run.directory / "gate.json").read_text() == verdict
    assert run.registry.champion_path().resolve().name == number
    assert (len(run.registry.versions()), run.registry.challenger()) == (int(number), None)
    (run.directory / "gate.json").unlink()  # as of another run that made the same drafter
    assert release(run, report) == 3
    assert (len(run.registry.versions()), run.registry.challenger()) == (int(number), None)


@pytest.mark.parametrize(("rival", "status"), [(1.05, 0), (1.4, 4)], ids=["a weaker one", "a better one"])
def test_a_drafter_is_judged_again_where_another_one_came_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival: float, status: int
) -> None:
    report, publish, came = measured(run, 1.2), Registry.publish, []

    def publish_after_the_rival(registry: Registry, *args: object, **kwargs: object) -> str:
        if not came:
            came.append(rival)
            publish_rival(run, tmp_path / "rival", rival)
        return publish(registry, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Registry, "publish", publish_after_the_rival)
    assert release(run, report) == status
    _, decision = read_release(run.directory)
    assert decision is not None
    assert decision.champion_version == "1"
    champion = run.registry.champion()
    assert champion is not None
    assert champion.number == ("2" if status == 0 else "1")
    assert [entry["version"] for entry in run.registry.history()] == (["1", "2"] if status == 0 else ["1"])


def test_the_same_target_under_another_name_is_the_same(run: Run) -> None:
    report, identity = measured(run, 1.0), run.target.identity
    assert export_faults(run.export, replace(identity, model_id="org/tiny-target"), report) == []
    (fault,) = export_faults(run.export, replace(identity, weights_sha256="0" * 64), report)
    assert "is not the run's target" in fault


def test_x1_a_damaged_export_is_rejected_and_not_published(run: Run) -> None:
    report = measured(run, 1.0)
    weights = next(run.export.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert release(run, report) == 4
    _, decision = read_release(run.directory)
    assert decision is not None
    assert decision.reason.startswith("export: ")
    assert "truncated" in decision.reason
    assert run.registry.champion() is None
    assert not (run.directory / "README.md").exists()


def test_g6_a_champion_whose_report_is_damaged_holds_the_next(run: Run) -> None:
    assert release(run, measured(run, 1.0)) == 0
    champion = run.registry.champion()
    assert champion is not None
    file = champion.path / "report.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace('"num_training_rows"', '"rows"'))
    assert release(run, measured(run, 1.3, seed=2)) == 3
    _, decision = read_release(run.directory)
    assert decision is not None
    assert "unknown keys ['rows']" in decision.reason
    assert run.registry.champion() == champion


def test_e14_an_export_for_another_chat_template_is_a_fault_to_the_gate(run: Run) -> None:
    report = measured(run, 1.0)
    assert export_faults(run.export, run.target.identity, report) == []
    other = replace(run.target.identity, chat_template_sha256="0" * 64)
    (fault,) = export_faults(run.export, other, report)
    assert "which is not the run's target: other chat_template; train again" in fault
