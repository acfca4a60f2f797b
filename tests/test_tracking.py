"""W&B goes offline without a key, keeps what the user set, and never shares a run id between attempts."""

import os
from pathlib import Path

import pytest

from specdist.tracking import prepare_wandb

NAMES = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_GROUP", "WANDB_RUN_ID", "WANDB_API_KEY", "WANDB_SILENT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the test's own changes are undone as well
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


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


def test_other_trackers_leave_the_environment_alone(tmp_path: Path) -> None:
    prepare_wandb(["tensorboard"], tmp_path, "group")
    assert not any(name in os.environ for name in NAMES)
