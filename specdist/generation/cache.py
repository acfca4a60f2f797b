"""Owns which batch writes the answers: in place where the model allows it, else transformers' own cache.

Shapes: B rows in use, T tokens of the prompts being read, V vocabulary.
A prompt is read up to its last token, which is the first step's input: logits come from steps alone.
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdist.in_place import InPlaceBatch, fits_in_place, forward


class Batch(Protocol):
    """Rows of text of which the keys and values are cached, in the order in which they joined or were last kept."""

    joins_midway: bool  # whether rows can join others that are being written

    def join(self, prompts: list[list[int]], places: int, width: int) -> None:
        """Read `prompts`, longest first, as rows after those in use. `places` rows of `width` tokens are enough."""

    def step(self, ids: list[int], positions: list[int]) -> Tensor:
        """Append one token to every row, the `positions`-th of its text: logits of the next one [B, V]."""

    def keep(self, order: list[int]) -> None:
        """Keep these rows alone, in this order; the first of them stay where they are as far as `order` allows."""


def new_batch(model: PreTrainedModel, pad_token_id: int) -> Batch:
    """The batch that fits the model: in place where every layer attends to all tokens, else transformers' own cache."""
    return (InPlaceBatch if fits_in_place(model) else LockstepBatch)(model, pad_token_id)


class LockstepBatch:
    """A batch of left-padded rows that begin together, on transformers' own cache: right for every kind of layer."""

    joins_midway = False

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self.model = model
        self.pad = [pad_token_id]

    def join(self, prompts: list[list[int]], places: int, width: int) -> None:
        longest = len(prompts[0]) - 1
        device = self.model.device
        self.cache = DynamicCache(config=self.model.config)
        self.mask = torch.tensor([[0] * (longest + 1 - len(p)) + [1] * (len(p) - 1) for p in prompts], device=device)
        if longest:
            ids = torch.tensor([self.pad * (longest + 1 - len(p)) + p[:-1] for p in prompts], device=device)  # [B, T]
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            self._feed(ids, positions)

    def step(self, ids: list[int], positions: list[int]) -> Tensor:
        device = self.model.device
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(ids), 1))], dim=-1)
        new, columns = (torch.tensor(values, device=device)[:, None] for values in (ids, positions))  # [B, 1]
        return self._feed(new, columns)

    def _feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits after the last of `ids` [B, T], which follow what the cache holds: [B, V]."""
        return forward(self.model, ids, self.cache, self.mask, positions, logits_to_keep=1).logits[:, -1]

    def keep(self, order: list[int]) -> None:
        rows = torch.tensor(order, dtype=torch.long, device=self.model.device)
        self.mask = self.mask[rows]
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
