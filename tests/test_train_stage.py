"""The training stage on scripted acceptances: rotation, early stopping, and both after a kill at any point."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from report_factory import make_result
from test_callbacks import Killed, make_trainer
from test_run import begin

from specdist import provenance
from specdist.errors import ArtifactError, ConfigError
from specdist.stages.assess import best_checkpoint, lower_bounds
from specdist.stages.run import Run
from specdist.stages.train import DONE_FILE, train
from specdist.training.checkpoints import COMPLETE_FILE, checkpoint_step, complete_checkpoints

# lower bounds of τ by step: the best is neither the newest nor among the last two
BOUNDS = {3: 1.10, 6: 1.30, 8: 1.22, 9: 1.20, 12: 1.25, 15: 1.15, 18: 1.40, 20: 1.35}


def scripted(run: Run, kill: Callable[[int, str], None]) -> Callable[[Path], dict[str, float]]:
    """Measures as `stages.assess` does, once and on disk, but what `BOUNDS` says."""

    def measure(checkpoint: Path) -> dict[str, float]:
        step = checkpoint_step(checkpoint)
        kill(step, "before")
        if step not in lower_bounds(run):
            result = make_result(0.8, per_domain=2)
            summary = replace(result.summary, mean_accepted_length_interval=[BOUNDS[step], 2.0])
            path = run.directory / "evaluations" / f"checkpoint-{step}.json"
            provenance.write_json(path, replace(result, summary=summary).to_json())
        kill(step, "after")
        return {"acceptance/mean_accepted_length_low": lower_bounds(run)[step]}

    return measure


def train_run(
    target: Path,
    directory: Path,
    *extra: str,
    kill: Callable[[int, str], None] = lambda step, when: None,
    max_steps: int = -1,
    made: list[weakref.ref] | None = None,
) -> Run:
    """Trains a tiny run's 20 steps, or `max_steps`. `made` gets references to the trainer and what it trained."""
    run = begin(directory, target, *extra)
    run.lock.release()
    provenance.write_json(run.directory / "evaluations" / "checkpoint-0.json", make_result(0.5, per_domain=2).to_json())

    def make(arguments):
        trainer = make_trainer(run.directory, max_steps=max_steps, save_total_limit=arguments.save_total_limit)
        if made is not None:
            made.extend([weakref.ref(trainer), weakref.ref(trainer.model)])
        return trainer

    train(run, make, scripted(run, kill))
    return run


def outcome(run: Run) -> dict:
    """What must not depend on kills."""
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().split("\n") if line]
    best, points = best_checkpoint(run)
    low = "acceptance/mean_accepted_length_low"
    return {
        "done": json.loads((run.checkpoints / DONE_FILE).read_text()),
        "complete": [path.name for path in complete_checkpoints(run.checkpoints)],
        "best": best.name,
        "points": [point.step for point in points],
        "loss": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "measured": [(line["step"], line[low]) for line in lines if low in line],
    }


def test_c11_rotation_leaves_the_best_and_the_report_knows_all(tiny_target_dir: Path, tmp_path: Path) -> None:
    run = train_run(tiny_target_dir, tmp_path, "--save_total_limit", "2", "--early_stopping_patience", "3")
    found = outcome(run)
    assert found["done"] == {"steps": 15, "stopped_early": True}
    assert found["complete"] == ["checkpoint-6", "checkpoint-15"]
    assert found["best"] == "checkpoint-6"
    assert found["points"] == [0, 3, 6, 9, 12, 15]
    assert found["measured"] == [(step, BOUNDS[step]) for step in (3, 6, 9, 12, 15)]


def test_without_patience_training_goes_to_its_end(tiny_target_dir: Path, tmp_path: Path) -> None:
    found = outcome(train_run(tiny_target_dir, tmp_path, "--save_total_limit", "2"))
    assert found["done"] == {"steps": 20, "stopped_early": False}
    assert found["complete"] == ["checkpoint-18", "checkpoint-20"]
    assert found["best"] == "checkpoint-18"
    assert found["points"] == [0, 3, 6, 9, 12, 15, 18, 20]


def test_c3_a_run_killed_around_measurements_ends_as_an_uninterrupted_one(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    settings = ("--save_total_limit", "2", "--early_stopping_patience", "3")
    whole = outcome(train_run(tiny_target_dir, tmp_path / "whole", *settings))
    kills = [(3, "before"), (6, "after"), (12, "after"), (15, "before"), (15, "after")]  # 15 is where it stops

    def kill(step: int, when: str) -> None:
        if kills and (step, when) == kills[0]:
            kills.pop(0)
            raise Killed

    while kills:
        with pytest.raises(Killed):
            train_run(tiny_target_dir, tmp_path / "cut", *settings, kill=kill)
    assert outcome(train_run(tiny_target_dir, tmp_path / "cut", *settings)) == whole


def test_c11_a_best_checkpoint_that_was_removed_is_an_error_until_it_is_made_anew(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    run = train_run(tiny_target_dir, tmp_path)
    for step in (18, 20):
        (run.checkpoints / f"checkpoint-{step}" / COMPLETE_FILE).unlink()
    with pytest.raises(ArtifactError, match="checkpoint-18: measured best of 7 checkpoints, but it was removed"):
        best_checkpoint(run)
    (run.checkpoints / DONE_FILE).unlink()
    measured = []
    train_run(tiny_target_dir, tmp_path, kill=lambda step, when: measured.append((step, step in lower_bounds(run))))
    assert (18, False) in measured, "what is known of a checkpoint that is gone does not stand for the new one"
    assert best_checkpoint(run)[0].name == "checkpoint-18"


@pytest.mark.parametrize("when", ["before", "after"])
def test_c3_a_run_killed_after_its_last_step_takes_no_other(tiny_target_dir: Path, tmp_path: Path, when: str) -> None:
    """The last of 8 steps is within an epoch of 10; the kill comes around its measurement."""

    def kill(step: int, at: str) -> None:
        if (step, at) == (8, when):
            raise Killed

    with pytest.raises(Killed):
        train_run(tiny_target_dir, tmp_path, kill=kill, max_steps=8)
    found = outcome(train_run(tiny_target_dir, tmp_path, max_steps=8))
    assert found["complete"][-1] == "checkpoint-8"
    assert found["done"] == {"steps": 8, "stopped_early": False}
    assert [step for step, _ in found["measured"]] == [3, 6, 8]


def test_the_trainer_is_gone_when_training_has_ended(tiny_target_dir: Path, tmp_path: Path) -> None:
    """What is evaluated next needs the memory of its weights, gradients and moments."""
    made: list[weakref.ref] = []
    gc.disable()
    try:
        train_run(tiny_target_dir, tmp_path, made=made, max_steps=3)
        assert [reference() for reference in made] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["no", "best"])
def test_c11_saving_that_would_measure_nothing_is_refused_at_the_start(
    tiny_target_dir: Path, tmp_path: Path, strategy: str
) -> None:
    with pytest.raises(ConfigError, match=f"save_strategy '{strategy}': each checkpoint is measured as it is saved"):
        begin(tmp_path, tiny_target_dir, "--save_strategy", strategy, "--metric_for_best_model", "loss")
    assert not (tmp_path / "run").exists()
