"""Medusa heads: what each head must predict, what is trained, and means that do not depend on how a batch is cut."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainingArguments

from specdist.drafters.heads import HEADS_FILE, MedusaHeads, load_heads
from specdist.errors import ArtifactError
from specdist.losses import linear_cross_entropy
from specdist.training.heads import IGNORED, HeadsCollator, head_labels, heads_loss, heads_trainer

VOCAB = 40


def row(prompt_length: int, length: int, seed: int = 0) -> dict:
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {
        "input_ids": ids,
        "labels": [IGNORED] * prompt_length + ids[prompt_length:],
        "prompt_length": prompt_length,
    }


def test_t1_t3_head_i_predicts_token_t_plus_2_plus_i_and_never_past_the_end() -> None:
    labels = head_labels([IGNORED, 11, 12, 13, 14, 15], 1, 3)
    assert labels.tolist() == [
        [12, 13, 14, 15, IGNORED, IGNORED],
        [13, 14, 15, IGNORED, IGNORED, IGNORED],
        [14, 15, IGNORED, IGNORED, IGNORED, IGNORED],
    ]
    assert [(labels[i] != IGNORED).sum().item() for i in range(3)] == [6 - 2 - i for i in range(3)]


def test_labels_begin_at_the_prompts_last_token_and_skip_the_prompt() -> None:
    labels = head_labels([IGNORED] * 4 + [21, 22, 23], 4, 2)
    assert labels[0].tolist() == [IGNORED, IGNORED, IGNORED, 22, 23, IGNORED, IGNORED]
    assert labels[1].tolist() == [IGNORED, IGNORED, IGNORED, 23, IGNORED, IGNORED, IGNORED]


@pytest.mark.parametrize("answer", [0, 1])
def test_an_answer_too_short_for_any_head_has_no_label(answer: int) -> None:
    assert (head_labels([IGNORED] * 3 + [5] * answer, 3, 2) == IGNORED).all()


def test_collator_pads_by_position_and_not_by_value() -> None:
    batch = HeadsCollator(2, pad_token_id=0)([row(2, 5), row(2, 8)])
    assert batch["input_ids"].tolist()[0] == row(2, 5)["input_ids"] + [0] * 3
    assert batch["labels"].shape == (2, 2, 8)
    assert (batch["labels"][0, :, 5:] == IGNORED).all()


def test_parameters_grow_with_layers_and_each_block_is_its_own() -> None:
    one, three = MedusaHeads(2, 1, 16), MedusaHeads(2, 3, 16)
    assert sum(p.numel() for p in three.parameters()) == 3 * sum(p.numel() for p in one.parameters())
    assert len({p.data_ptr() for p in three.parameters()}) == 2 * 3 * 2
    assert set(one.state_dict()) == {f"{i}.0.linear.{kind}" for i in range(2) for kind in ("weight", "bias")}


def test_untrained_heads_repeat_the_targets_next_token() -> None:
    hidden = torch.randn(5, 16)
    assert torch.equal(MedusaHeads(3, 2, 16)(hidden), hidden.expand(3, 5, 16))


def test_heads_loss_is_the_decayed_sum_of_cross_entropies() -> None:
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, VOCAB, bias=False)
    features, labels = torch.randn(3, 6, 8), torch.randint(0, VOCAB, (6, 3))
    labels[4:, 2] = IGNORED
    total, sums = heads_loss(features, projection.weight, labels, decay=0.5)
    expected = [
        torch.nn.functional.cross_entropy(projection(features[i]), labels[:, i], reduction="sum") for i in range(3)
    ]
    torch.testing.assert_close(sums, torch.stack(expected).detach())
    torch.testing.assert_close(total, expected[0] + 0.5 * expected[1] + 0.25 * expected[2])


def train_once(tmp_path: Path, *, batch: int, accumulation: int, rows: list[dict], bf16: bool = False):
    target = make_tiny_llama(VOCAB, seed=1).requires_grad_(False)
    heads = MedusaHeads(3, 2, target.config.hidden_size)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
    )
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = heads_trainer(heads, target, Dataset.from_list(rows), arguments, decay=0.8, pad_token_id=0)
    trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    return trainer, heads


def test_t3_t12_every_head_learns_the_optimizer_holds_only_heads_and_the_target_stays(tmp_path: Path) -> None:
    trainer, heads = train_once(tmp_path, batch=4, accumulation=1, rows=[row(3, 12, seed) for seed in range(4)])
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in heads.parameters()}
    assert all(parameter.abs().sum() > 0 for parameter in heads.parameters())
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {f"head_{i}_loss" for i in range(3)} <= logged.keys()


def test_t9_accumulation_gives_the_step_of_one_batch(tmp_path: Path) -> None:
    rows = [row(3, 5 + 4 * seed, seed) for seed in range(4)]  # unequal lengths: a mean of means would differ
    whole, heads_whole = train_once(tmp_path / "whole", batch=4, accumulation=1, rows=rows)
    parts, heads_parts = train_once(tmp_path / "parts", batch=1, accumulation=4, rows=rows)
    torch.testing.assert_close(
        torch.nn.utils.parameters_to_vector(heads_whole.parameters()),
        torch.nn.utils.parameters_to_vector(heads_parts.parameters()),
        atol=1e-6,
        rtol=1e-4,
    )
    losses = [next(e["loss"] for e in t.state.log_history if "loss" in e) for t in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_vocabulary_product_runs_in_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def loss(*arguments):
        seen.append(torch.is_autocast_enabled("cpu"))
        return linear_cross_entropy(*arguments)

    monkeypatch.setattr("specdist.training.heads.linear_cross_entropy", loss)
    rows = [row(3, 12, seed) for seed in range(2)]
    train_once(tmp_path, batch=2, accumulation=1, rows=rows, bf16=True)
    assert seen == [True] * 3  # the trainer's own autocast covers the heads' forward alone


def test_t4_a_batch_without_any_label_is_no_nan(tmp_path: Path) -> None:
    _, heads = train_once(tmp_path, batch=2, accumulation=1, rows=[row(5, 6, seed) for seed in range(2)])
    assert all(torch.isfinite(parameter).all() for parameter in heads.parameters())


def test_m13_no_label_of_any_head_crosses_into_another_row() -> None:
    rows = [row(1, 3, 0), row(1, 5, 1)]
    together = HeadsCollator(3, pad_token_id=0)(rows)["labels"]
    for b, single in enumerate(rows):
        alone = HeadsCollator(3, pad_token_id=0)([single])["labels"][0]
        size = alone.shape[1]
        assert torch.equal(together[b, :, :size], alone)
        assert (together[b, :, size:] == IGNORED).all()


@pytest.mark.parametrize("damage", ["missing", "renamed", "shape"])
def test_x1_incomplete_heads_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    tensors = dict(MedusaHeads(2, 1, 8).state_dict())
    if damage == "missing":
        del tensors["1.0.linear.bias"]
    elif damage == "renamed":
        tensors["1.0.fc.bias"] = tensors.pop("1.0.linear.bias")
    else:
        tensors["1.0.linear.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / HEADS_FILE)
    with pytest.raises(ArtifactError, match=r"1\.0\."):
        load_heads(tmp_path / HEADS_FILE)
