"""Medusa heads as published, written plainly: what benchmark_train_heads.py measures ours beside.

Documents are padded to one length, the target runs on all of it, and all heads' logits are stacked at all positions.
Shapes: H heads, B rows, T tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from benchmark_process import device
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.losses import IGNORED
from specdist.training.batches import padded


class PlainBlock(nn.Module):
    """x + SiLU(Wx + b), with W and b zero at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class PlainHeads(nn.ModuleList):
    """Of each head a block and a projection of its own, which starts as the target's `weight` [V, D]."""

    def __init__(self, num_heads: int, weight: Tensor) -> None:
        vocab_size, size = weight.shape
        super().__init__(
            nn.Sequential(PlainBlock(size), nn.Linear(size, vocab_size, bias=False)) for _ in range(num_heads)
        )
        for head in self:
            head[1].weight.data.copy_(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, D] → the logits of all heads [H, B, T, V]."""
        return torch.stack([head(hidden) for head in self]).float()


def head_labels(labels: Tensor, index: int) -> Tensor:
    """What head `index` predicts at each position but the last 2 + index: [B, T] → [B, T − 2 − index].

    As in ours it learns from the states that produced the answer: at t if token t + 1 is of it, as is t + 2 + index.
    """
    return labels[:, 2 + index :].where(labels[:, 1 : -1 - index] != IGNORED, IGNORED)


def plain_sums(heads: PlainHeads, hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The sum of each head's cross-entropy, and the number of its labels. `hidden` [B, T, D], `labels` [B, T]."""
    logits, sums = heads(hidden), []
    for i, of_head in enumerate(logits):
        wanted = head_labels(labels, i)
        loss = nn.functional.cross_entropy(
            of_head[:, : -2 - i].flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        sums.append((loss, (wanted != IGNORED).sum()))
    return sums


def liger_sums(heads: PlainHeads, hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """As `plain_sums`, without logits of all positions."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused, sums = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum"), []
    for i, (block, projection) in enumerate(heads):
        wanted = head_labels(labels, i)
        loss = fused(projection.weight, block(hidden)[:, : -2 - i].flatten(0, 1), wanted.flatten())
        sums.append((loss, (wanted != IGNORED).sum()))
    return sums


@torch.no_grad()
def plain_states(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The target's final states at all positions, in fp32: [B, T, D]."""
    return model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state.float()


def plain_batches(rows: list[dict[str, Any]], size: int, max_length: int) -> list[dict[str, Tensor]]:
    """Batches of `size` documents, padded to `max_length`."""
    filler = {"input_ids": [0] * max_length, "labels": [IGNORED] * max_length}
    batches = [padded([*rows[i : i + size], filler], 0) for i in range(0, len(rows), size)]
    return [{key: value[:-1].to(device()) for key, value in batch.items()} for batch in batches]
