"""A resumed run, the metrics file, measuring each save, and stopping at the first NaN."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from draft_factory import ROWS, with_top_tokens
from draft_factory import examples as draft_examples
from draft_factory import make_trainer as make_draft_trainer
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from specdist.dataset.features import target_states
from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.errors import ArtifactError
from specdist.losses import Objective
from specdist.target import output_projection
from specdist.training.callbacks import CheckpointAcceptance, MetricsFile, run_training
from specdist.training.checkpoints import complete_checkpoints, last_complete_checkpoint
from specdist.training.finite import NotFinite
from specdist.training.heads import HeadsCollator, heads_trainer
from specdist.training.target_output import TargetOutput

VOCAB = 40


class Killed(Exception):
    """Stands for SIGKILL inside one process."""


def make_trainer(directory: Path, **others: Any) -> Trainer:
    target = make_tiny_llama(VOCAB, seed=1).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(40):
        ids = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
        rows.append({"id": f"row-{i}", "input_ids": ids, "labels": [-100] * 3 + ids[3:], "prompt_length": 3})
    settings = {
        "output_dir": str(directory / "checkpoints"),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "train_sampling_strategy": "group_by_length",
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return heads_trainer(
        DraftHeads(HeadsShape(2, 1, target.config.hidden_size, VOCAB)),
        HeadsCollator(Dataset.from_list(rows), 0),
        TrainingArguments(**(settings | others)),
        objective=Objective({"cross_entropy": 1.0}),
        target=TargetOutput(output_projection(target, target.config), target),
        decay=0.8,
    )


def run(directory: Path, kill_at: int | None = None) -> Trainer:
    def measure(checkpoint: Path) -> dict[str, float]:
        step = int(checkpoint.name.split("-")[1])
        if step == kill_at:
            raise Killed
        torch.rand(3)  # as building a model to measure does; the order of later epochs must not feel it
        return {"acceptance/mean_accepted_length": 1.0 + step / 100}

    trainer = make_trainer(directory)
    train(trainer, directory, measure)
    return trainer


def train(
    trainer: Trainer, directory: Path, measure: Callable[[Path], dict[str, float]] = lambda checkpoint: {}
) -> None:
    """As the recipes' stage trains, on from what is on disk."""
    run_training(
        trainer,
        resume_from=last_complete_checkpoint(directory / "checkpoints", is_main_process=True),
        callbacks=[MetricsFile(directory / "metrics.jsonl"), CheckpointAcceptance(measure, dict)],
    )


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
    assert re.search(f"checkpoint-20: {name}, expected .*goes on from .*checkpoint-18", caplog.text)
    assert [(e["step"], e["loss"], e["learning_rate"]) for e in logged(tmp_path) if "loss" in e] == before
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("lost", "how"),
    [("scheduler.pt", "missing"), ("optimizer.pt", "missing"), ("rng_state.pth", "missing"), ("optimizer.pt", "cut")],
)
def test_c2_a_checkpoint_that_lacks_what_resuming_needs_is_refused(tmp_path: Path, lost: str, how: str) -> None:
    with pytest.raises(Killed):
        run(tmp_path, kill_at=3)
    (checkpoint,) = complete_checkpoints(tmp_path / "checkpoints")
    file = checkpoint / lost
    whole = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(whole[:-1])
    found = "no file" if how == "missing" else len(whole) - 1
    with pytest.raises(ArtifactError, match=f"{lost}, expected {len(whole)} bytes, found {found}; .* to train again"):
        run(tmp_path)
    assert complete_checkpoints(tmp_path / "checkpoints"), "nothing is deleted where there is nothing to go on from"
    file.write_bytes(whole)
    run(tmp_path)


# As in recipes, transformers' filter of losses is left as it is and steps are logged seldom
SELDOM = {"logging_steps": 100, "lr_scheduler_type": "constant", "save_steps": 5}


@pytest.mark.parametrize("save_steps", [4, 100])
def test_t4_weights_that_overflow_stop_training_with_step_heads_and_rows(tmp_path: Path, save_steps: int) -> None:
    trainer = make_trainer(tmp_path, **SELDOM | {"learning_rate": math.inf, "save_steps": save_steps})
    message = (
        r"^step 2: loss, head_0, head_1 of the rows (row-\d+, ){3}row-\d+ \(nor .*: not finite; .*Lower learning_rate"
    )
    with pytest.raises(NotFinite, match=message):
        train(trainer, tmp_path)
    assert not complete_checkpoints(tmp_path / "checkpoints")


def test_t4_the_row_of_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SELDOM)
    examples = trainer.data_collator.examples
    stored = target_states(tmp_path / "states", examples, lambda: make_tiny_llama(VOCAB, seed=1))
    (file,) = (tmp_path / "states").iterdir()
    tensors = load_file(file)
    tensors["states"][17 * 9] = math.nan  # the first of row 17: 9 tokens of each were written by the target
    save_file(tensors, file)
    trainer.data_collator.states = stored
    with pytest.raises(NotFinite, match=r"^step \d+: loss, head_0, head_1 of the rows .*row-17[,: ]"):
        train(trainer, tmp_path)


def test_t4_one_head_that_is_not_finite_is_named_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SELDOM)
    with torch.no_grad():
        next(parameter for name, parameter in trainer.model.named_parameters() if name.startswith("1.")).fill_(math.inf)
    with pytest.raises(NotFinite, match=r"^step 1: loss, head_1 of the rows"):
        train(trainer, tmp_path)


def test_t4_a_gradient_that_is_not_finite_stops_training_while_losses_are(tmp_path: Path) -> None:
    trainer, calls = make_trainer(tmp_path, **SELDOM | {"max_steps": 3}), itertools.count(1)
    parameter = next(trainer.model.parameters())
    parameter.register_hook(lambda gradient: gradient * math.inf if next(calls) == 3 else gradient)
    with pytest.raises(NotFinite, match=r"^step 3: the gradient: not finite"):
        train(trainer, tmp_path)
    assert not complete_checkpoints(tmp_path / "checkpoints")


def test_t4_an_overflow_that_fp16_scales_down_is_no_fault_and_a_loss_is(tmp_path: Path) -> None:
    trainer, metrics = make_trainer(tmp_path), MetricsFile(tmp_path / "metrics.jsonl")
    trainer.args.fp16 = True  # set late: this machine has no device on which the trainer would take it
    trainer.watch.begin([{"members": torch.tensor([3, 1])}])
    trainer.watch.add_losses(torch.tensor(2.0), torch.tensor([1.5, 0.5]))
    trainer.watch.end(trainer, torch.tensor(math.inf))
    trainer.watch.check()
    metrics.on_log(trainer.args, trainer.state, trainer.control, {"loss": 2.0, "grad_norm": math.inf})
    assert [{**line, "time": 0} for line in logged(tmp_path)] == [{"step": 0, "time": 0, "loss": 2.0}]
    trainer.watch.begin([{"members": torch.tensor([3, 1])}])
    trainer.watch.add_losses(torch.tensor(math.inf), torch.tensor([1.5, math.inf]))
    trainer.watch.end(trainer, torch.tensor(math.inf))
    with pytest.raises(NotFinite, match=r"^step 1: loss, head_1 of the rows row-3, row-1: not finite"):
        trainer.watch.check()


def test_t4_weights_that_are_not_finite_never_make_a_complete_checkpoint(tmp_path: Path) -> None:
    """Loss and gradient of the only step are finite; its update is not."""
    trainer = make_trainer(tmp_path, **SELDOM | {"learning_rate": math.inf, "max_steps": 1})
    with pytest.raises(NotFinite, match=r"checkpoint-1/model\.safetensors: .*: not finite"):
        train(trainer, tmp_path)
    assert not complete_checkpoints(tmp_path / "checkpoints")
    assert last_complete_checkpoint(tmp_path / "checkpoints", is_main_process=True) is None


def test_t4_a_target_distribution_that_is_not_finite_names_the_loss_and_the_row(tmp_path: Path) -> None:
    rows = with_top_tokens(draft_examples(ROWS), 5).add_column("id", [f"row-{i}" for i in range(len(ROWS))]).to_list()
    rows[2]["tail_mass"][3] = math.nan
    objective = Objective({"cross_entropy": 0.5, "forward_kl": 0.5})
    trainer = make_draft_trainer(
        tmp_path,
        Dataset.from_list(rows),
        batch=1,
        objective=objective,
        collate={"top": True},
        max_steps=4,
        logging_steps=100,
    )
    with pytest.raises(NotFinite, match=r"^step \d: loss, forward_kl of the rows row-2[ :]"):
        train(trainer, tmp_path)
