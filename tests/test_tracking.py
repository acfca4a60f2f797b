"""W&B goes offline without a key, keeps what the user set, and never shares a run id between attempts."""

import os
import sys
import time
from pathlib import Path

import pytest
import wandb
from test_callbacks import Killed, logged, make_trainer
from transformers.integrations import WandbCallback
from wandb_factory import NAMES, clean, hanging_server, read_runs, refusing_url

from specdist import tracking
from specdist.tracking import offline_reason, offline_runs, prepare_wandb, start_wandb
from specdist.training.callbacks import CheckpointAcceptance, MetricsFile, run_training
from specdist.training.checkpoints import last_complete_checkpoint

__all__ = ["clean"]  # a fixture that every test here uses


def test_k2_without_a_key_it_is_offline_and_each_attempt_has_its_own_id(tmp_path: Path) -> None:
    ids = set()
    for _ in range(3):
        prepare_wandb(["wandb"], tmp_path, "group")
        ids.add(os.environ["WANDB_RUN_ID"])
    assert len(ids) == 3
    assert os.environ["WANDB_MODE"] == "offline"
    assert os.environ["WANDB_RUN_GROUP"] == "group"


def test_with_a_key_or_a_wish_the_mode_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    prepare_wandb(["wandb"], tmp_path, "group")
    assert "WANDB_MODE" not in os.environ
    monkeypatch.setenv("WANDB_MODE", "disabled")
    prepare_wandb(["wandb"], tmp_path, "group")
    assert os.environ["WANDB_MODE"] == "disabled"


def test_a_run_id_that_the_user_gave_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    prepare_wandb(["wandb"], tmp_path, "group")
    assert os.environ["WANDB_RUN_ID"] == "mine"
    assert offline_runs(tmp_path) == tmp_path / "wandb" / "offline-run-*-mine"


def test_other_trackers_leave_the_environment_alone(tmp_path: Path) -> None:
    prepare_wandb(["tensorboard"], tmp_path, "group")
    assert not any(name in os.environ for name in NAMES)


def train(directory: Path, kill_at: int | None = None) -> None:
    """One attempt of a small run that logs to W&B as a recipe's does."""

    def measure(checkpoint: Path) -> dict[str, float]:
        step = int(checkpoint.name.split("-")[1])
        if step == kill_at:
            raise Killed
        return {tracking.GAIN_OVER_UNTRAINED: step / 100}

    trainer, metrics = make_trainer(directory), MetricsFile(directory / "metrics.jsonl")
    resume_from = last_complete_checkpoint(directory / "checkpoints", is_main_process=True)
    values = measure(resume_from) if resume_from else {}
    step = int(resume_from.name.split("-")[1]) if resume_from else 0
    if resume_from:
        metrics.resume(step, values)
    prepare_wandb(["wandb"], directory, "lineage")
    start_wandb(["wandb"], None, step=step, values=values)
    trainer.add_callback(WandbCallback())
    try:
        run_training(trainer, resume_from=resume_from, callbacks=[metrics, CheckpointAcceptance(measure, dict)])
    finally:
        wandb.finish()


def test_k1_k2_k3_an_offline_run_that_is_killed_and_resumed_is_complete_on_disk(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, kill_at=9)
    train(tmp_path)
    lines = logged(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21)), "no hole, nothing twice"
    gains = {line["step"]: line[tracking.GAIN_OVER_UNTRAINED] for line in lines if tracking.GAIN_OVER_UNTRAINED in line}
    assert sorted(gains) == [3, 6, 9, 12, 15, 18, 20]
    runs = read_runs(tmp_path / "wandb")
    assert len({run.id for run in runs}) == 2, "an id of its own for each attempt"
    assert {run.group for run in runs} == {"lineage"}
    seen: dict[int, float] = {}
    for run in runs:
        steps = [row["train/global_step"] for row in run.history]
        assert steps == sorted(steps)
        assert "train/global_step" in run.step_metrics
        seen |= {
            row["train/global_step"]: row[f"train/{tracking.GAIN_OVER_UNTRAINED}"]
            for row in run.history
            if f"train/{tracking.GAIN_OVER_UNTRAINED}" in row
        }
    assert seen == gains, "both attempts together hold every gain"


@pytest.mark.parametrize("server", ["refuses", "hangs", "hangs later"])
def test_k4_a_broken_server_costs_seconds_and_no_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr(tracking, "PROBE_SECONDS", 0.2)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    with hanging_server(alive=server == "hangs later") as url:
        monkeypatch.setenv("WANDB_BASE_URL", refusing_url() if server == "refuses" else url)
        prepare_wandb(["wandb"], tmp_path, "lineage")
        assert bool(offline_reason()) == (server != "hangs later")
        begin = time.monotonic()
        start_wandb(["wandb"], None)
        assert time.monotonic() - begin < 60, "W&B's own limits are 90 s, and none"
        assert os.environ["WANDB_MODE"] == "offline"
        assert wandb.run is not None
        wandb.log({"train/loss": 1.0})
        wandb.finish()
    (run,) = [run for run in read_runs(tmp_path / "wandb") if run.history]
    assert (run.group, run.history[0]["train/loss"]) == ("lineage", 1.0)


def test_where_wandb_cannot_start_at_all_training_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "soon")  # no error of wandb's own
    train(tmp_path)
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == list(range(1, 21))
    assert read_runs(tmp_path / "wandb") == []
    assert "W&B records nothing of this run: ValueError: could not convert" in caplog.text


def test_wandb_is_told_no_secret_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--hub_token", "SECRET"])
    prepare_wandb(["wandb"], tmp_path, "lineage")
    start_wandb(["wandb"], None)
    wandb.finish()
    assert read_runs(tmp_path / "wandb")[0].finished
    written = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert [file.name for file in written if b"SECRET" in file.read_bytes()] == []
