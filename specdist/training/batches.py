"""Owns batches for training a draft model: padded or packed rows, with what the target said at supervised positions.

Shapes: B rows, T tokens, S supervised positions of the batch in row order, D hidden size, K best tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from specdist.dataset.examples import column_lengths
from specdist.dataset.features import TargetStates
from specdist.losses import IGNORED


class DraftCollator:
    """Makes a batch of `input_ids` and `labels` from items of `schedule`: [B, T], padded at the right; with the items'
    `members`.

    With `packed` it is one row with `position_ids` that start anew at each document, by which attention stays inside
    it. With `states`, the target's states go along as `target_states` [S, D]; with `top`, its best tokens as
    `top_ids`, `top_logprobs` [S, K] and `tail_mass` [S].
    """

    def __init__(
        self,
        examples: Dataset,
        pad_token_id: int,
        *,
        packed: bool = False,
        states: TargetStates | None = None,
        top: bool = False,
    ) -> None:
        self.examples, self.pad_token_id, self.packed = examples, pad_token_id, packed
        self.states, self.top = states, top

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        members = [index for item in items for index in item["members"]]
        rows = [self.examples[index] for index in members] or [self._nothing()]
        batch = flattened(rows) if self.packed else padded(rows, self.pad_token_id)
        batch["members"] = torch.tensor(members, dtype=torch.long)
        if self.states is not None:
            batch["target_states"] = torch.cat([self.states.of(i) for i in members or [0]])[: None if members else 0]
        if self.top:
            batch |= _top_tokens(rows)
        return batch

    def _nothing(self) -> dict[str, Any]:
        """A row in which nothing is learned, for a batch of items without members."""
        first = self.examples[0]
        num_best = len(first["top_ids"]) // len(first["tail_mass"]) if self.top else 0
        best = {"top_ids": np.empty((0, num_best)), "top_logprobs": np.empty((0, num_best)), "tail_mass": []}
        return {"input_ids": [self.pad_token_id] * 2, "labels": [IGNORED] * 2, **(best if self.top else {})}


def schedule(examples: Dataset, capacity: int | None = None, *, multiple_of: int = 1) -> Dataset:
    """What a trainer draws from: `members` (indices into `examples`) and `length` in tokens.

    Each example by itself, or packs of at most `capacity` tokens. Items without members make their number a multiple
    of `multiple_of`, the items of all processes' batches: else accelerate would repeat some to fill the last of them,
    and what is learned would depend on the number of processes.
    """
    lengths = column_lengths(examples, "input_ids").tolist()
    groups: list[list[int]] = pack(lengths, capacity) if capacity else [[i] for i in range(len(lengths))]
    groups += [[] for _ in range(-len(groups) % multiple_of)]
    return Dataset.from_dict({"members": groups, "length": [sum(lengths[i] for i in group) for group in groups]})


def padded(rows: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Rows of `input_ids` and `labels` side by side, padded at the right: [B, T]."""
    length = max(len(row["input_ids"]) for row in rows)
    input_ids, labels = torch.full((len(rows), length), pad_token_id), torch.full((len(rows), length), IGNORED)
    for b, row in enumerate(rows):
        size = len(row["input_ids"])
        input_ids[b, :size] = torch.as_tensor(row["input_ids"])
        labels[b, :size] = torch.as_tensor(row["labels"])
    return {"input_ids": input_ids, "labels": labels}


def flattened(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows one after the other in a single row [1, T]; no document's first token is a label of the one before."""
    labels = [torch.as_tensor(row["labels"]).clone() for row in rows]
    for row_labels in labels:
        row_labels[0] = IGNORED
    return {
        "input_ids": torch.cat([torch.as_tensor(row["input_ids"]) for row in rows])[None].long(),
        "labels": torch.cat(labels)[None].long(),
        "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None],
    }


def _top_tokens(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    masses = [np.asarray(row["tail_mass"], dtype=np.float32) for row in rows]
    count = sum(map(len, masses))  # S

    def table(name: str, dtype: Any) -> Tensor:
        values = torch.from_numpy(np.concatenate([np.asarray(row[name], dtype=dtype) for row in rows]))
        return values.view(count, -1) if count else values

    return {
        "top_ids": table("top_ids", np.int64),
        "top_logprobs": table("top_logprobs", np.float32),
        "tail_mass": torch.from_numpy(np.concatenate(masses)),
    }


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Share rows out into packs of at most `capacity` tokens: best fit, longest first. Indices, each once.

    Rows keep their order inside a pack, and packs the order of their first rows. A row of more than `capacity` tokens
    is a pack of its own.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], -1))
        left, number = room.pop(place) if place < len(room) else (capacity, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(index)
        insort(room, (left - lengths[index], number))
    return sorted((sorted(members) for members in packs), key=lambda members: members[0])
