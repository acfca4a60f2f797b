"""Owns training draft heads on the frozen target (Medusa-1): the batches, what each head must predict, the trainer.

Heads and target together (Medusa-2) are trained in medusa2.py, with the same batches.

Shapes: B rows, T tokens, S supervised tokens of a batch in row order, H heads, D hidden size, V vocabulary.

Row u of a batch stands for one token that the target wrote: its id, and the target's state that produced it. Head i
predicts the token of row u from the state of row u − 1 − i, in the same answer (heads.py, offset rule). So row u is the
same for all heads, and so is the target's distribution there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

from specdist.dataset.features import TargetStates
from specdist.drafter_config import HYDRA
from specdist.drafters.heads import DraftHeads
from specdist.errors import ConfigError
from specdist.fused_losses import heads_objective
from specdist.losses import IGNORED, FullTarget, Objective, Projection, TargetDistributions
from specdist.schema_heads import TOP
from specdist.training.arguments import settle_arguments
from specdist.training.batches import padded, rows_of, schedule
from specdist.training.finite import StepWatch
from specdist.training.order import seeded_by_epoch
from specdist.training.target_output import TargetOutput


class HeadsCollator:
    """Makes a batch of items of `schedule`: their `members`, `labels` [S], the answers' tokens, and `completion_index`
    [S], their places in their answers.

    With `states` the target's go along as `target_states` [S, D], and the target need not run. Else its `input_ids`
    [B, T] do, with `positions` [S], the places of the states that produced the tokens in all rows laid end to end. With
    `packed` the documents of an item share a row, as `batches.rows_of` has it.
    """

    def __init__(
        self, examples: Dataset, pad_token_id: int, *, packed: bool = False, states: TargetStates | None = None
    ) -> None:
        self.examples, self.pad_token_id, self.packed, self.states = examples, pad_token_id, packed, states

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        members = [index for item in items for index in item["members"]]
        packs = [[self.examples[index] for index in item["members"]] for item in items if item["members"]]
        answers = [torch.as_tensor(row["input_ids"][row["prompt_length"] :]) for pack in packs for row in pack]
        nothing = [torch.empty(0, dtype=torch.long)]  # of items without members
        batch = {
            "members": torch.tensor(members, dtype=torch.long),
            "labels": torch.cat(answers or nothing).long(),
            "completion_index": torch.cat([torch.arange(len(answer)) for answer in answers] or nothing),
        }
        if self.states is not None:
            batch["target_states"] = torch.cat([self.states.of(i) for i in members or [0]])[: len(batch["labels"])]
            return batch
        if not packs:
            return batch | {"input_ids": torch.full((1, 1), self.pad_token_id), "positions": nothing[0]}
        laid = padded(rows_of(packs, packed=self.packed), self.pad_token_id)
        positions = (laid.pop("labels").flatten() != IGNORED).nonzero()[:, 0] - 1
        return batch | laid | {"positions": positions}


def head_rows(labels: Tensor, completion_index: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """What each head predicts, and from which row: labels [H, S], IGNORED where it predicts nothing, and rows [H, S].

    Head i has no answer's first 1 + i tokens: no state of the answer lies so far back. An answer of n tokens gives it
    n − 1 − i labels.
    """
    back = 1 + torch.arange(num_heads, device=labels.device)[:, None]  # [H, 1]
    rows = torch.arange(len(labels), device=labels.device) - back  # [H, S]
    return torch.where(completion_index >= back, labels, IGNORED), rows.clamp(min=0)


def following_embeddings(embed: torch.nn.Module | None, labels: Tensor, num_heads: int) -> Tensor:
    """The target's embeddings of each row's token and the H − 1 after it, which Hydra heads see: [S, H, D].

    Raises ConfigError without `embed`.
    """
    if embed is None:
        raise ConfigError("hydra heads see the target's token embeddings: give them")
    following = torch.arange(len(labels), device=labels.device)[:, None] + torch.arange(num_heads, device=labels.device)
    with torch.no_grad():  # what lies past an answer's end is seen by no head that has a label there
        seen = embed(labels[following.clamp(max=max(0, len(labels) - 1))])
        return seen.to(labels.device, torch.float32)


class LossLog:
    """Of each of N named projections the mean objective and how often its k best held the label, since last told."""

    def __init__(self, names: Sequence[str], objective: Objective, device: torch.device) -> None:
        self.names, self.weights = names, list(objective.weights.values())
        self.top = torch.tensor(TOP, device=device)
        # Of each projection: the objective's terms, the labels among its k best for each k, the labels
        self.sums = torch.zeros(len(names), len(self.weights) + len(TOP) + 1, device=device)

    def add(self, sums: Tensor, labels: Tensor, ranks: Tensor) -> None:
        """Sums of the losses [N, terms] over the labels [N, S] that are not IGNORED, and the ranks of these [N, S]."""
        counted = (labels != IGNORED)[..., None]  # [N, S, 1]
        hits = ((ranks[..., None] < self.top) & counted).sum(dim=1)
        self.sums += torch.cat([sums, hits, counted.sum(dim=1)], dim=-1)

    def tell(self, accelerator: Accelerator) -> dict[str, float]:
        """The means over all processes by name, and begin anew. One without a label has none."""
        told: dict[str, float] = {}
        for name, sums in zip(self.names, accelerator.reduce(self.sums).tolist(), strict=True):
            if count := sums.pop():
                terms = sums[: len(self.weights)]
                loss = sum(weight * term for weight, term in zip(self.weights, terms, strict=True))
                told[f"{name}_loss"] = round(loss / count, 4)
                hits = zip(TOP, sums[len(self.weights) :], strict=True)
                told |= {f"{name}_top{k}": round(number / count, 4) for k, number in hits}
        self.sums.zero_()
        return told


class ProjectionsTrainer(Trainer):
    """Trains by a weighted sum of one objective at several named projections, and logs each of them by itself."""

    def __init__(self, objective: Objective, weights: dict[str, float], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = True  # so that tokens are counted over processes and accumulation steps
        self.objective: Objective = objective
        self.projection_weights = list(weights.values())
        self.losses = LossLog(list(weights), objective, self.args.device)
        self.watch = StepWatch(list(weights), arguments["data_collator"].examples)
        self.add_callback(self.watch)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return seeded_by_epoch(super()._get_train_sampler(train_dataset), self)

    def at_rows(self, features: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Of each head's features [S, D] those of its rows [H, S], in the dtype of its product with the projection."""
        with self.accelerator.autocast():
            kind = features[0].device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features[0].dtype
        return [feature.to(dtype)[at] for feature, at in zip(features, rows, strict=True)]

    def mean_loss(
        self,
        features: Sequence[Tensor],
        projections: Sequence[Projection],
        labels: Tensor,
        target: TargetDistributions | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """Over the supervised tokens of all processes and accumulation steps. `features` of each projection [S, D];
        `labels` [N, S], IGNORED where it predicts nothing."""
        ranks = torch.zeros_like(labels)
        with self.accelerator.autocast():  # which the trainer applies to the model's own forward only
            total, sums = heads_objective(
                features,
                projections,
                labels,
                self.objective,
                target,
                counted=labels != IGNORED,
                head_weights=self.projection_weights,
                ranks=ranks,
            )
        self.losses.add(sums, labels, ranks)
        self.watch.add_losses(total, sums.sum(dim=-1))
        if num_items_in_batch is None:
            return total / max(1, labels.shape[1])
        # The count covers all processes, over which DDP averages the gradients
        return total / torch.as_tensor(num_items_in_batch).clamp(min=1) * self.accelerator.num_processes

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Batches of a step, which are watched."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.watch.begin(batches)
        return batches, count

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
        return self.watch.end(self, super()._get_grad_norm(model, grad_norm))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each one's mean objective since the last log, and the share of labels that were among its k best."""
        if "loss" in logs:
            logs.update(self.losses.tell(self.accelerator))
        super().log(logs, start_time)


def head_weights(num_heads: int, decay: float) -> dict[str, float]:
    """By name, decay^i of head i."""
    return {f"head_{i}": decay**i for i in range(num_heads)}


class HeadsTrainer(ProjectionsTrainer):
    """Trains the heads alone: the target is no part of the trained module, nor of its DDP wrap."""

    def __init__(
        self, heads: DraftHeads, *, objective: Objective, target: TargetOutput, decay: float, **arguments: Any
    ) -> None:
        super().__init__(objective, head_weights(heads.num_heads, decay), model=heads, **arguments)
        self.target, self.shape = target.on(self.args.device), heads.shape

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Σ over heads of decay^i times its objective, over the supervised tokens of all processes and accumulation
        steps (Cai et al. 2024, eq. 1)."""
        tokens = inputs["labels"]
        labels, rows = head_rows(tokens, inputs["completion_index"], self.shape.num_heads)  # [H, S] each
        states = self.target.states(inputs, inputs.get("positions", tokens))
        hydra = self.shape.kind == HYDRA
        embeddings = following_embeddings(self.target.embed, tokens, self.shape.num_heads) if hydra else None
        features = model(states.float(), embeddings)  # H times [S, D]
        heads = self.accelerator.unwrap_model(model)
        projections = [heads.projection(i, self.target.projection) for i in range(heads.num_heads)]
        distributions: TargetDistributions | None = None
        if self.objective.needs_target:
            distributions = FullTarget(states, self.target.projection)
        features = self.at_rows(features, rows)
        return self.mean_loss(features, projections, labels, distributions, num_items_in_batch)


def heads_trainer(
    heads: DraftHeads,
    collator: HeadsCollator,
    arguments: TrainingArguments,
    *,
    objective: Objective,
    target: TargetOutput,
    decay: float,
    pack_tokens: int | None = None,
) -> HeadsTrainer:
    """A trainer over the examples of `collator` (input_ids, prompt_length).

    Head i weighs decay^i. `pack_tokens`: for a packed collator, the most tokens that share a row.
    """
    settle_arguments(arguments)
    # Every parameter gets a gradient at every step, heads' own projections from the loss: outside the module's forward,
    # where a search for unused ones would not see them
    arguments.ddp_find_unused_parameters = False
    return HeadsTrainer(
        heads,
        objective=objective,
        target=target,
        decay=decay,
        args=arguments,
        train_dataset=schedule(
            collator.examples, pack_tokens, multiple_of=arguments.train_batch_size * arguments.world_size
        ),
        data_collator=collator,
    )
