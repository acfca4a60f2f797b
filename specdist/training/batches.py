"""Owns batches for training a draft model: padded or packed rows, with what the target said at supervised positions.

Shapes: B rows, T tokens, S supervised positions of the batch in row order, D hidden size, K best tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain
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

    With `packed` the documents of an item share a row, as `rows_of` has it. With `states`, the target's states go along
    as `target_states` [S, D]; with `top`, its best tokens as `top_ids`, `top_logprobs` [S, K] and `tail_mass` [S].
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
        packs = [[self.examples[index] for index in item["members"]] for item in items if item["members"]]
        packs = packs or [[self._nothing()]]
        batch = padded(rows_of(packs, packed=self.packed), self.pad_token_id)
        batch["members"] = torch.tensor(members, dtype=torch.long)
        if self.states is not None:
            batch["target_states"] = torch.cat([self.states.of(i) for i in members or [0]])[: None if members else 0]
        if self.top:
            batch |= _top_tokens(list(chain.from_iterable(packs)))
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


def rows_of(packs: Sequence[Sequence[dict[str, Any]]], *, packed: bool) -> list[dict[str, Any]]:
    """The rows of a batch: each document by itself, or with `packed` each pack's documents one after the other.

    A packed row has `position_ids` that start anew at each document, by which attention stays inside it; no document's
    first token is a label of the one before.
    """
    return [_joined(pack) for pack in packs] if packed else list(chain.from_iterable(packs))


def _joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "input_ids": np.concatenate([document["input_ids"] for document in documents]),
        "labels": np.concatenate([[IGNORED, *document["labels"][1:]] for document in documents]),
        "position_ids": np.concatenate([np.arange(len(document["input_ids"])) for document in documents]),
    }


def padded(rows: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Rows of `input_ids`, `labels` and maybe `position_ids` side by side, padded at the right: [B, T] each.

    At position 0 each padding token of a packed row is a document of its own, and no position exceeds the longest
    document's, beyond which a model may have none.
    """
    length = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name, filler in (("input_ids", pad_token_id), ("labels", IGNORED), ("position_ids", 0)):
        if name in rows[0]:
            batch[name] = torch.full((len(rows), length), filler)
            for values, row in zip(batch[name], rows, strict=True):
                values[: len(row[name])] = torch.as_tensor(row[name])
    return batch


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
