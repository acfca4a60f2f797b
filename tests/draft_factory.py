"""Owns what tests of training a draft share: a tiny draft and target, rows to learn, and a trainer for one step."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from datasets import Dataset
from training_factory import sgd_settings
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from specdist.dataset.features import TargetStates, target_states
from specdist.losses import Objective
from specdist.target import output_projection
from specdist.training.batches import DraftCollator
from specdist.training.draft import DraftTrainer, draft_trainer
from specdist.training.on_policy import OnPolicy
from specdist.training.target_output import TargetOutput

SFT = Objective({"cross_entropy": 1.0})
MIXTURE = Objective({"cross_entropy": 0.5, "forward_kl": 1.0, "negative_log_acceptance": 1.0}, temperature=0.7)
TARGET = make_tiny_llama(268, layers=3, seed=7)
ROWS = [(4, 9), (11, 3), (2, 20), (7, 1)]


def examples(lengths: list[tuple[int, int]]) -> Dataset:
    rows = []
    for i, (prompt, answer) in enumerate(lengths):
        ids = torch.randint(0, 256, (prompt + answer,), generator=torch.Generator().manual_seed(i)).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "prompt_length": prompt})
    return Dataset.from_list(rows)


def make_trainer(
    directory: Path,
    rows: Dataset,
    *,
    batch: int,
    accumulation: int = 1,
    freeze: bool = False,
    objective: Objective = SFT,
    collate: dict[str, Any] | None = None,
    target: TargetOutput | None = None,
    vocabulary: torch.Tensor | None = None,
    on_policy: OnPolicy | None = None,
    draft: PreTrainedModel | None = None,
    **extra: Any,
) -> DraftTrainer:
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, **extra}
    arguments = SFTConfig(**sgd_settings(directory, activation_checkpointing=False, **settings))
    return draft_trainer(
        draft or make_tiny_llama(268),
        make_tiny_tokenizer(),
        DraftCollator(rows, 0, **(collate or {})),
        arguments,
        num_tokens=268,
        objective=objective,
        target=target,
        vocabulary=vocabulary,
        on_policy=on_policy,
        freeze_embeddings=freeze,
    )


def step(trainer: SFTTrainer) -> tuple[float, torch.Tensor]:
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def target_output(*, live: bool = True) -> TargetOutput:
    return TargetOutput(output_projection(TARGET, TARGET.config), TARGET if live else None)


def states_of(rows: Dataset, directory: Path) -> TargetStates:
    return target_states(directory, rows, lambda: TARGET)


def with_top_tokens(rows: Dataset, best: int) -> Dataset:
    """`rows` with the target's best tokens as a dataset stores them."""
    columns: dict[str, list[list[float]]] = {"top_ids": [], "top_logprobs": [], "tail_mass": []}
    for row in rows:
        with torch.inference_mode():
            logits = TARGET(torch.tensor([row["input_ids"]])).logits[0, row["prompt_length"] - 1 : -1]
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(best)
        columns["top_ids"].append(top.indices.flatten().tolist())
        columns["top_logprobs"].append(top.values.flatten().tolist())
        columns["tail_mass"].append(logprobs.exp().scatter(-1, top.indices, 0.0).sum(-1).tolist())
    for name, values in columns.items():
        rows = rows.add_column(name, values)
    return rows


def on_policy(share: float) -> OnPolicy:
    return OnPolicy(share, temperature=0.7, eos_token_ids=[266], pad_token_id=0, seed=3)
