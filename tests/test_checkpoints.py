"""Checkpoints on disk: half-written and half-deleted ones, the best of them, rotation, and when to train no more."""

import shutil
from pathlib import Path

import pytest

from specdist.errors import ArtifactError
from specdist.provenance import write_json
from specdist.training.checkpoints import (
    COMPLETE_FILE,
    best_step,
    checkpoint_step,
    complete_checkpoints,
    is_stalled,
    last_complete_checkpoint,
    mark_complete,
    rotate,
)


def make_checkpoints(directory: Path, *steps: int) -> None:
    for step in steps:
        (directory / f"checkpoint-{step}").mkdir()
        mark_complete(directory / f"checkpoint-{step}")


def steps_in(directory: Path) -> list[int]:
    return [checkpoint_step(path) for path in complete_checkpoints(directory)]


def test_c8_a_half_written_checkpoint_is_passed_over_and_removed(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, 3, 6)
    (tmp_path / "checkpoint-9").mkdir()
    assert last_complete_checkpoint(tmp_path, is_main_process=False) == tmp_path / "checkpoint-6"
    assert (tmp_path / "checkpoint-9").exists()
    assert last_complete_checkpoint(tmp_path, is_main_process=True) == tmp_path / "checkpoint-6"
    assert not (tmp_path / "checkpoint-9").exists()


def save_optimizer(directory: Path, step: int) -> Path:
    file = directory / f"checkpoint-{step}" / "optimizer.pt"
    file.parent.mkdir()
    file.write_bytes(b"moments")
    return file


def test_c2_an_earlier_checkpoint_that_lost_its_optimizer_is_none_to_resume_from(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        save_optimizer(tmp_path, step)
        mark_complete(tmp_path / f"checkpoint-{step}")
    for step in (6, 9):
        (tmp_path / f"checkpoint-{step}" / COMPLETE_FILE).unlink()
    missing = r"checkpoint-3: checkpoint incomplete: .*optimizer.pt, expected 7 bytes, found no file.* to train again"
    for is_main_process in (False, True):
        with pytest.raises(ArtifactError, match=missing):
            last_complete_checkpoint(tmp_path, is_main_process=is_main_process)
    assert steps_in(tmp_path) == [3]


def test_c8_training_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, 3)
    for step in (6, 9):
        file = save_optimizer(tmp_path, step)
        mark_complete(file.parent)
    file.write_bytes(file.read_bytes()[:-1])
    assert last_complete_checkpoint(tmp_path, is_main_process=True) == tmp_path / "checkpoint-6"
    assert steps_in(tmp_path) == [3, 6], "what is newer is made anew"


def test_c2_a_mark_of_an_older_version_says_so(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, 3)
    write_json(tmp_path / "checkpoint-3" / COMPLETE_FILE, {"step": 3})
    with pytest.raises(ArtifactError, match=f"{COMPLETE_FILE} does not list its files"):
        last_complete_checkpoint(tmp_path, is_main_process=True)


@pytest.mark.parametrize(
    ("limit", "bounds", "kept"),
    [
        (None, {3: 1.3, 6: 1.2, 9: 1.1, 12: 1.0}, [3, 6, 9, 12]),
        (1, {3: 1.3, 6: 1.2, 9: 1.1, 12: 1.0}, [3, 12]),
        (2, {3: 1.3, 6: 1.2, 9: 1.1, 12: 1.0}, [3, 12]),
        (3, {3: 1.3, 6: 1.2, 9: 1.1, 12: 1.0}, [3, 9, 12]),
        (2, {3: 1.0, 6: 1.3, 9: 1.3, 12: 1.2}, [6, 12]),  # the earliest of equals, as the export takes
        (1, {3: 1.0, 6: 1.1, 9: 1.2, 12: 1.3}, [12]),
        (2, {3: 1.0, 6: 1.1, 9: 1.2, 12: 1.3}, [9, 12]),
        (9, {3: 1.0, 6: 1.1, 9: 1.2, 12: 1.3}, [3, 6, 9, 12]),
        (1, {2: 1.9, 3: 1.3, 6: 1.2}, [12]),  # the best was removed by hand
    ],
)
def test_c11_rotation_keeps_the_best_and_the_newest(
    tmp_path: Path, limit: int | None, bounds: dict[int, float], kept: list[int]
) -> None:
    make_checkpoints(tmp_path, 3, 6, 9, 12)
    rotate(tmp_path, bounds, limit)
    assert steps_in(tmp_path) == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"checkpoint-{step}" for step in kept)


def test_c11_a_kill_in_the_middle_of_deleting_leaves_no_complete_ruin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoints(tmp_path, 3, 6, 9)
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"weights")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            rotate(tmp_path, {3: 1.0, 6: 1.2, 9: 1.1}, 2)
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-3" / COMPLETE_FILE).exists()
    assert steps_in(tmp_path) == [6, 9]
    assert last_complete_checkpoint(tmp_path, is_main_process=True) == tmp_path / "checkpoint-9"
    assert not (tmp_path / "checkpoint-3").exists()


@pytest.mark.parametrize(
    ("bounds", "patience", "stalled"),
    [
        ({}, 1, False),
        ({3: 1.0}, 1, False),
        ({3: 1.0, 6: 1.1}, 1, False),
        ({3: 1.1, 6: 1.1}, 1, True),  # equal is no better
        ({3: 1.1, 6: 1.0}, 2, False),
        ({3: 1.1, 6: 1.0, 9: 1.05}, 2, True),  # better than the one before is not better than the best
        ({9: 1.05, 3: 1.1, 6: 1.0}, 2, True),  # whatever the order on disk
        ({3: 1.1, 6: 1.0, 9: 1.2}, 2, False),
        ({3: 1.1, 6: 1.0, 9: 1.0, 12: 1.0}, 0, False),
    ],
)
def test_training_stops_after_patience_checkpoints_without_a_better_bound(
    bounds: dict[int, float], patience: int, stalled: bool
) -> None:
    assert is_stalled(bounds, patience) is stalled


def test_the_best_is_the_earliest_of_equals() -> None:
    assert best_step({9: 1.2, 6: 1.2, 3: 1.0}) == 6
