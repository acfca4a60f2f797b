"""What a judged drafter leaves for W&B waits in an outbox; `specdist sync` sends it, or says what remains and why."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from test_release import measured, run
from wandb_factory import clean, hanging_server, read_runs, refusing_url

from specdist import cli, tracking
from specdist.evaluation.report import REPORT_FILE
from specdist.outbox import Outbox, OutboxEntry
from specdist.stages.release import release
from specdist.stages.run import Run
from specdist.stages.send import send
from specdist.stages.sync import sync, unsent_runs

__all__ = ["clean", "run"]  # fixtures


def released(run: Run, strength: float = 1.0, seed: int = 1) -> Outbox:
    """A drafter judged in a run that reports to W&B, which nothing reaches."""
    run.config.training.report_to = ["wandb"]
    os.environ["WANDB_MODE"] = "offline"
    release(run, measured(run, strength, seed))
    del os.environ["WANDB_MODE"]
    return Outbox(run.registry.root)


def only(outbox: Outbox) -> OutboxEntry:
    (entry,) = outbox.pending()
    return entry


def test_a_promoted_drafter_waits_once_with_all_its_files_and_its_lineage(run: Run, tmp_path: Path) -> None:
    outbox = released(run)
    entry = only(outbox)
    assert entry.group == entry.link == run.config.release.model_name
    assert [a.type for a in entry.outputs] == ["drafter", "evaluation", "gate"]
    assert entry.outputs[0].digest == run.registry.versions()[0].tags["drafter_sha256"]
    assert {"medusa_lm_head.safetensors", "export.json", "README.md"} <= entry.outputs[0].files.keys()
    assert entry.metrics["release/version"] == 1
    assert entry.metrics["release/gain_over_untrained"] > 0
    released(run)
    assert only(outbox) == entry, "the same release again is the same entry"
    outbox.mark_sent(entry)
    released(run)
    assert outbox.pending() == [], "what was sent is not sent again"

    moved = shutil.move(run.registry.root, tmp_path / "elsewhere")
    assert all((Path(moved) / path).is_file() for a in entry.outputs for path in a.files.values())


def test_a_rejected_drafter_leaves_its_verdict_and_no_weights(run: Run) -> None:
    entry = only(released(run, strength=0.01))
    assert entry.link is None
    assert [a.type for a in entry.outputs] == ["evaluation", "gate"]
    assert entry.outputs[1].metadata["verdict"] == "reject"


def test_nothing_waits_of_a_run_that_does_not_report_to_wandb(run: Run) -> None:
    release(run, measured(run, 1.0))
    assert Outbox(run.registry.root).pending() == []
    assert sync(run.registry.root) == ["nothing waits to be sent"]


def test_an_outbox_that_cannot_be_written_ends_no_run(run: Run) -> None:
    (run.registry.root / ".outbox").write_text("in the way")
    run.config.training.report_to = ["wandb"]
    assert release(run, measured(run, 1.0)) == 0


def test_k4_what_is_sent_holds_artifacts_numbers_table_and_page(run: Run, tmp_path: Path) -> None:
    outbox = released(run)
    entry = only(outbox)
    send(outbox.root, entry, "", tmp_path, mode="offline")
    (sent,) = read_runs(tmp_path / "wandb")
    assert (sent.id, sent.group, sent.project) == (entry.digest, entry.group, "specdist")
    name, files, metadata = sent.artifacts["drafter"]
    assert (name, files) == (entry.link, sorted(entry.outputs[0].files))
    assert metadata["digest"] == entry.outputs[0].digest
    assert sent.artifacts["gate"][2]["verdict"] == "promote"
    assert "release/version" in sent.step_metrics
    (row,) = sent.history
    assert {key: row[key] for key in entry.metrics} == entry.metrics
    report = json.loads((run.directory / REPORT_FILE).read_text())
    domains = next(r for r in report["acceptance"] if r["setting"] == "greedy")["domains"]
    assert row["release/domains/nrows"] == len(domains)
    assert row["release/report/_type"] == "html-file"


def test_sync_without_a_key_or_a_server_says_so_and_loses_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = released(run)
    entry, command = only(outbox), ["sync", "--root", str(outbox.root)]
    assert cli.main(command) == 0
    assert "not sent: no key found" in capsys.readouterr().out
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", refusing_url())
    assert cli.main(command) == 0
    assert "does not answer" in capsys.readouterr().out
    monkeypatch.setattr(tracking, "PROBE_SECONDS", 0.2)
    with hanging_server(alive=False) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        assert cli.main(command) == 0
    assert f"1 wait in {outbox.directory}" in capsys.readouterr().out
    assert only(outbox) == entry


def test_k4_a_server_that_hangs_in_the_middle_is_given_up_after_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = released(run)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with hanging_server(alive=True) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        begin = time.monotonic()
        lines = sync(outbox.root, seconds=0.5)
        assert time.monotonic() - begin < 10
    assert lines[0].endswith("not done after 0.5 s")
    assert len(outbox.pending()) == 1


@pytest.mark.parametrize("given", [False, True], ids=["run's directory", "WANDB_DIR"])
def test_the_offline_runs_of_all_attempts_are_sent_and_no_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    if given:
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
    for directory in (run.directory, run.directory, tmp_path / "another"):
        tracking.prepare_wandb(["wandb"], directory, "group")
        tracking.start_wandb(["wandb"], None)
        wandb.finish()
    outbox = released(run)
    found = unsent_runs(outbox.root, only(outbox))
    assert len(found) == 2
    assert {path.parent for path in found} == {(tmp_path / "scratch" if given else run.directory) / "wandb"}
    for path in found:
        (path / "run.wandb.synced").touch()
    assert unsent_runs(outbox.root, only(outbox)) == []


def test_an_entry_of_before_names_a_directory_of_offline_runs(run: Run) -> None:
    outbox = released(run)
    entry = replace(only(outbox), offline_runs=outbox.relative(run.directory / "wandb"))
    (run.directory / "wandb" / "offline-run-20260101_000000-1a2b3c4d").mkdir(parents=True)
    assert [path.name for path in unsent_runs(outbox.root, entry)] == ["offline-run-20260101_000000-1a2b3c4d"]


def test_a_file_that_is_gone_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = released(run, strength=0.01)
    (run.directory / "gate.json").unlink()
    monkeypatch.setattr("specdist.stages.sync.offline_reason", lambda: "")
    assert "gate.json is gone; restore it" in sync(outbox.root)[0]
