"""A resumed run, the metrics file, measuring each save, and stopping at the first NaN."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.losses import Objective
from specdist.target import output_projection
from specdist.training.callbacks import CheckpointAcceptance, MetricsFile, NonFiniteLoss, run_training
from specdist.training.checkpoints import complete_checkpoints, last_complete_checkpoint
from specdist.training.heads import HeadsCollator, heads_trainer
from specdist.training.target_output import TargetOutput

VOCAB = 40


class Killed(Exception):
    """Stands for SIGKILL inside one process."""


def make_trainer(directory: Path, learning_rate: float = 1e-2) -> Trainer:
    target = make_tiny_llama(VOCAB, seed=1).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(40):
        ids = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:], "prompt_length": 3})
    arguments = TrainingArguments(
        output_dir=str(directory / "checkpoints"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        train_sampling_strategy="group_by_length",
        learning_rate=learning_rate,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )
    return heads_trainer(
        DraftHeads(HeadsShape(2, 1, target.config.hidden_size, VOCAB)),
        HeadsCollator(Dataset.from_list(rows), 0),
        arguments,
        objective=Objective({"cross_entropy": 1.0}),
        target=TargetOutput(output_projection(target, target.config), target),
        decay=0.8,
    )


def run(directory: Path, kill_at: int | None = None, **arguments: float) -> Trainer:
    def measure(checkpoint: Path) -> dict[str, float]:
        step = int(checkpoint.name.split("-")[1])
        if step == kill_at:
            raise Killed
        torch.rand(3)  # as building a model to measure does; the order of later epochs must not feel it
        return {"acceptance/mean_accepted_length": 1.0 + step / 100}

    trainer = make_trainer(directory, **arguments)
    run_training(
        trainer,
        resume_from=last_complete_checkpoint(directory / "checkpoints", is_main_process=True),
        callbacks=[MetricsFile(directory / "metrics.jsonl"), CheckpointAcceptance(measure, dict)],
    )
    return trainer


def logged(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().split("\n") if line]


@pytest.mark.parametrize("kill_at", [6, 9, 12, 15])  # steps 11 to 20 are the second epoch
def test_c3_c4_k1_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, kill_at: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", kill_at=kill_at)
    resumed = run(tmp_path / "cut")
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    series = [
        [(e["step"], e["loss"], e["learning_rate"]) for e in logged(tmp_path / name) if "loss" in e]
        for name in ("whole", "cut")
    ]
    assert series[0] == series[1], "each step stands in metrics.jsonl once, with the same loss and learning rate"
    assert [step for step, *_ in series[0]] == list(range(1, 21))


def test_every_save_is_measured_and_logged(tmp_path: Path) -> None:
    run(tmp_path)
    measured = [e["step"] for e in logged(tmp_path) if "acceptance/mean_accepted_length" in e]
    assert measured == [3, 6, 9, 12, 15, 18, 20]
    assert [p.name for p in complete_checkpoints(tmp_path / "checkpoints")] == [f"checkpoint-{s}" for s in measured]


def test_only_the_two_newest_checkpoints_keep_what_resuming_needs(tmp_path: Path) -> None:
    run(tmp_path)
    with_optimizer = {p.parent.name for p in (tmp_path / "checkpoints").rglob("optimizer.pt")}
    assert with_optimizer == {"checkpoint-18", "checkpoint-20"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_c8_a_cut_newest_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path)
    file = tmp_path / "checkpoints" / "checkpoint-20" / name
    file.write_bytes(file.read_bytes()[:-1])
    before = [(e["step"], e["loss"], e["learning_rate"]) for e in logged(tmp_path) if "loss" in e]
    resumed = run(tmp_path)
    assert f"{name}: truncated" in caplog.text
    assert "goes on from" in caplog.text
    assert "checkpoint-18" in caplog.text
    assert [(e["step"], e["loss"], e["learning_rate"]) for e in logged(tmp_path) if "loss" in e] == before
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_t4_training_stops_at_the_first_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"not finite.*Lower learning_rate"):
        run(tmp_path, learning_rate=math.inf)
