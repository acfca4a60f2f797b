"""Owns training Medusa heads on the frozen target (Medusa-1): labels of every head, the loss, the trainer.

Shapes: B rows, T tokens, H heads, S supervised positions of a head, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments

from specdist.drafters.heads import MedusaHeads
from specdist.losses import linear_cross_entropy
from specdist.training.order import seeded_by_epoch

IGNORED = -100


def head_labels(labels: list[int], prompt_length: int, num_heads: int) -> Tensor:
    """What each head must predict at each position: entry [i, t] is token t+2+i of the answer, else −100. [H, T]

    `labels` [T] has −100 on the prompt. The first supervised position is the prompt's last token, whose state wrote
    the answer's first token, as in serving. Head i of an answer of n tokens has n − 1 − i labels.
    """
    length = len(labels)
    result = torch.full((num_heads, length), IGNORED)
    answer = torch.tensor(labels)
    for i in range(min(num_heads, length - prompt_length - 1)):
        positions = torch.arange(prompt_length - 1, length - 2 - i)
        result[i, positions] = answer[positions + 2 + i]
    return result


class HeadsCollator:
    """Pads rows at the right and gives every head its labels [B, H, T].

    There is no attention mask: under causal attention no token sees the padding at its right.
    """

    def __init__(self, num_heads: int, pad_token_id: int) -> None:
        self.num_heads, self.pad_token_id = num_heads, pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        input_ids = torch.full((len(rows), length), self.pad_token_id)
        labels = torch.full((len(rows), self.num_heads, length), IGNORED)
        for b, row in enumerate(rows):
            size = len(row["input_ids"])
            input_ids[b, :size] = torch.tensor(row["input_ids"])
            labels[b, :, :size] = head_labels(row["labels"], row["prompt_length"], self.num_heads)
        return {"input_ids": input_ids, "labels": labels}


def heads_loss(features: Tensor, weight: Tensor, labels: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each head, summed over its labels; head i weighs decay^i in the total.

    `features` [H, S, D] of the heads, `weight` [V, D] of the projection, `labels` [S, H] with −100 where a head has
    none. Returns the weighted sum [] and each head's own sum [H]; the caller divides by the number of labels
    (Cai et al. 2024, eq. 1, as a mean over labels).
    """
    total, sums = features.new_zeros((), dtype=torch.float32), []
    for i, feature in enumerate(features):
        labelled = labels[:, i] != IGNORED  # [S]
        loss = linear_cross_entropy(feature[labelled], weight, labels[labelled, i])
        sums.append(loss.detach())
        total = total + decay**i * loss
    return total, torch.stack(sums)


class HeadsTrainer(Trainer):
    """Trains the heads alone: the target runs without gradients, outside the trained module and its DDP wrap."""

    def __init__(self, heads: MedusaHeads, target_model: PreTrainedModel, decay: float, **arguments: Any) -> None:
        super().__init__(model=heads, **arguments)
        self.model_accepts_loss_kwargs = True  # so that labels are counted over processes and accumulation steps
        self.target_model, self.decay = target_model, decay
        self._head_sums = torch.zeros(heads.num_heads, device=self.args.device)
        self._head_counts = torch.zeros(heads.num_heads, device=self.args.device)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return seeded_by_epoch(super()._get_train_sampler(train_dataset), self)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Weighted cross-entropy, as a mean over the labels of all heads, processes and accumulation steps."""
        # The target runs in its own dtype: autocast, which is for the heads, would cast at each of its layers
        with torch.no_grad(), torch.autocast(self.args.device.type, enabled=False):
            output = self.target_model.base_model(input_ids=inputs["input_ids"], use_cache=False)
        # Head 0 has a label wherever any head has one; only these positions reach the heads and the vocabulary
        supervised = inputs["labels"][:, 0] != IGNORED  # [B, T]
        labels = inputs["labels"].transpose(1, 2)[supervised]  # [S, H]
        features = model(output.last_hidden_state[supervised].float())  # [H, S, D]
        with self.accelerator.autocast():  # which the trainer applies to the heads' own forward only
            total, sums = heads_loss(features, self.target_model.get_output_embeddings().weight, labels, self.decay)
        counts = (labels != IGNORED).sum(dim=0)
        self._head_sums += sums
        self._head_counts += counts
        if num_items_in_batch is None:
            return total / counts.sum().clamp(min=1)
        # The count covers all processes, over which DDP averages the gradients
        return total / torch.as_tensor(num_items_in_batch).clamp(min=1) * self.accelerator.num_processes

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each head's own mean loss since the last log."""
        if "loss" in logs:
            sums = self.accelerator.reduce(self._head_sums)
            counts = self.accelerator.reduce(self._head_counts)
            means = (sums / counts).tolist()  # NaN where a head had no label: nothing to report
            logs.update({f"head_{i}_loss": round(mean, 4) for i, mean in enumerate(means) if mean == mean})
            self._head_sums.zero_()
            self._head_counts.zero_()
        super().log(logs, start_time)


def heads_trainer(
    heads: MedusaHeads,
    target_model: PreTrainedModel,
    examples: Dataset,
    arguments: TrainingArguments,
    *,
    decay: float,
    pad_token_id: int,
) -> HeadsTrainer:
    """A trainer over `examples` (input_ids, labels, prompt_length)."""
    arguments.remove_unused_columns = False
    return HeadsTrainer(
        heads,
        target_model,
        decay,
        args=arguments,
        train_dataset=examples,
        data_collator=HeadsCollator(heads.num_heads, pad_token_id),
    )
