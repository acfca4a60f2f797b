"""Training a draft model: the loss is TRL's, the prompt is not learned, a mean is over tokens and not over batches."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from specdist.errors import ConfigError
from specdist.losses import linear_cross_entropy
from specdist.training.draft import draft_trainer


def examples(lengths: list[tuple[int, int]]) -> Dataset:
    rows = []
    for i, (prompt, answer) in enumerate(lengths):
        ids = torch.randint(0, 256, (prompt + answer,), generator=torch.Generator().manual_seed(i)).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "prompt_length": prompt})
    return Dataset.from_list(rows)


def make_trainer(directory: Path, rows: Dataset, *, batch: int, accumulation: int = 1, freeze: bool = False, **extra):
    arguments = SFTConfig(
        output_dir=str(directory),
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
        activation_checkpointing=False,
        disable_tqdm=True,
        **{"bf16": False, **extra},
    )
    return draft_trainer(make_tiny_llama(268), make_tiny_tokenizer(), rows, arguments, freeze_embeddings=freeze)


def test_the_vocabulary_product_runs_in_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def loss(*arguments):
        seen.append(torch.is_autocast_enabled("cpu"))
        return linear_cross_entropy(*arguments)

    monkeypatch.setattr("specdist.training.draft.linear_cross_entropy", loss)
    make_trainer(tmp_path, examples(ROWS), batch=4, bf16=True).train()
    assert seen == [True]  # the trainer's own autocast covers the model's forward alone


def step(trainer: SFTTrainer) -> tuple[float, torch.Tensor]:
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


ROWS = [(4, 9), (11, 3), (2, 20), (7, 1)]


def test_the_step_is_the_one_of_trls_own_loss(tmp_path: Path) -> None:
    fused = make_trainer(tmp_path / "fused", examples(ROWS), batch=4)
    plain = make_trainer(tmp_path / "plain", examples(ROWS), batch=4)
    plain._fuses_projection = False
    (loss, weights), (expected_loss, expected_weights) = step(fused), step(plain)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)


def test_t9_accumulation_gives_the_step_of_one_batch(tmp_path: Path) -> None:
    whole = step(make_trainer(tmp_path / "whole", examples(ROWS), batch=4))
    parts = step(make_trainer(tmp_path / "parts", examples(ROWS), batch=1, accumulation=4))
    assert parts[0] == pytest.approx(whole[0], rel=1e-4)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-5, rtol=1e-4)


def test_m13_a_batch_has_the_losses_of_its_rows_apart(tmp_path: Path) -> None:
    rows = [(1, 2), (1, 4)]
    together = step(make_trainer(tmp_path / "together", examples(rows), batch=2))[0]
    trainer = make_trainer(tmp_path / "apart", examples(rows), batch=1)
    losses = []
    for row in trainer.train_dataset:
        ids, prompt = torch.tensor([row["input_ids"]]), row["prompt_length"]
        with torch.inference_mode():
            logits = trainer.model(ids).logits[0, prompt - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum"))
    assert together == pytest.approx(float(sum(losses)) / 6, rel=1e-4)


@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_m13_rows_that_would_attend_to_each_other_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="attend to each other"):
        make_trainer(tmp_path, examples(ROWS), batch=2, **{key: True})


@pytest.mark.parametrize("prompt", [4, 60])
def test_t2_a_long_prompt_does_not_shrink_the_loss(tmp_path: Path, prompt: int) -> None:
    trainer = make_trainer(tmp_path, examples([(prompt, 5)]), batch=1)
    row = trainer.train_dataset[0]
    with torch.inference_mode():
        logits = trainer.model(torch.tensor([row["input_ids"]])).logits[0, prompt - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(row["input_ids"][prompt:]))
    assert step(trainer)[0] == pytest.approx(float(expected), rel=1e-4)


def test_frozen_embeddings_stay_and_the_layers_learn(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, examples(ROWS), batch=4, freeze=True)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    step(trainer)
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert not changed & {"model.embed_tokens.weight", "lm_head.weight"}


def test_m4_a_batch_of_prompts_only_is_no_nan(tmp_path: Path) -> None:
    rows = examples([(8, 0), (8, 0)])
    loss, weights = step(make_trainer(tmp_path, rows, batch=2))
    assert loss == 0.0
    assert torch.isfinite(weights).all()
