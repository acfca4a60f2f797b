"""Owns the key-value cache of a running batch: rows join it with their prompts, take steps, and leave it when done.

Shapes: B rows in use, R places for rows, W tokens of a place, T tokens of the prompts being read, L longest text in
use, H key-value heads, D head dimension, V vocabulary.
A prompt is read up to its last token, which is the first step's input: logits come from steps alone.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from specdist.target import cache_argument

READ_TOKENS = 4096  # of prompts in one pass, padding included: bounds what the pass needs beside the cache
PADDING = 16  # tokens of a prompt that are cheaper than another pass


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
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    implementation = model.config.get_text_config()._attn_implementation
    in_place = (
        kinds == {DynamicLayer}
        and implementation in ("sdpa", "eager")
        and model.is_backend_compatible()  # passes on a mask that is made here
        and _takes(model, "position_ids")
    )
    return (InPlaceBatch if in_place else LockstepBatch)(model, pad_token_id)


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _last_logits(model: PreTrainedModel, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor) -> Tensor:
    """Logits after the last of `ids` [B, T], which follow what the cache holds: [B, V]."""
    options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
    options = {name: value for name, value in options.items() if _takes(model, name)}
    options[cache_argument(model)] = cache
    return model(input_ids=ids, attention_mask=mask, use_cache=True, **options).logits[:, -1]


def _similar(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Split prompts, longest first, where padding to the longest wastes a quarter or a pass would become too large."""
    start = 0
    for end in range(1, len(prompts) + 1):
        longest = len(prompts[start])
        if (
            end == len(prompts)
            or longest - len(prompts[end]) > max(longest // 4, PADDING)
            or (end + 1 - start) * longest > READ_TOKENS
        ):
            yield prompts[start:end]
            start = end


@dataclass
class _Span:
    """What of the places is in use, and what the next forward pass writes there. Shared by all layers."""

    places: int = 0  # R
    width: int = 0  # W
    rows: int = 0  # B
    length: int = 0  # L
    cells: tuple[Tensor, Tensor] | None = None  # rows [B] and columns [B] of a step's tokens; None: prompts, after B


class _InPlaceLayer(CacheLayerMixin):
    """Keys and values [R, H, W, D] that are written where they stay. Every row begins at column 0 of its place."""

    def __init__(self, span: _Span) -> None:
        super().__init__()
        self.span = span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        # zeros: what a row has not written yet is masked, but NaN would show through the mask
        return like.new_zeros((self.span.places, like.shape[1], self.span.width, like.shape[3]))

    def resize(self) -> None:
        """Make room as the span now says and move the rows in use there."""
        for name in ("keys", "values") if self.is_initialized else ():
            old = getattr(self, name)
            new = self._allocate(old)
            used = slice(self.span.rows), slice(None), slice(min(self.span.length, self.span.width))
            new[used] = old[used]
            setattr(self, name, new)

    def move(self, sources: list[int], places: list[int]) -> None:
        """Copy rows to other places."""
        for states in (self.keys, self.values):
            if states is not None:
                states[places, :, : self.span.length] = states[sources, :, : self.span.length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] of prompts or [B, H, 1, D] of a step; gives what the new tokens attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, states: Any, new: Tensor) -> Tensor:
        count, _, tokens, _ = new.shape
        if self.span.cells is None:
            states[self.span.rows : self.span.rows + count, :, :tokens] = new
            return new
        rows, columns = (indexes.to(new.device) for indexes in self.span.cells)
        states[rows, :, columns] = new[:, :, 0]
        return states[:count, :, : self.span.length]

    def get_seq_length(self) -> int:
        """Tokens before the new ones. A row may have fewer: the mask says."""
        return 0 if self.span.cells is None else self.span.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the new tokens meet, and the column of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.span.width


class InPlaceBatch:
    """A batch whose rows have places of their own, so that rows join and leave while others are written.

    Nothing is concatenated or shifted. Padding is to the right of a text, where no token sees it.
    """

    joins_midway = True

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self.model = model
        self.pad = [pad_token_id]
        self.span = _Span()
        self.layers: list[Any] = [_InPlaceLayer(self.span) for _ in DynamicCache(config=model.config).layers]
        self.cache = Cache(layers=self.layers)

    def join(self, prompts: list[list[int]], places: int, width: int) -> None:
        span = self.span
        if span.rows + len(prompts) > span.places or width > span.width:
            span.places, span.width = places, width
            for layer in self.layers:
                layer.resize()
        span.cells = None
        for group in _similar(prompts):
            self._read(group)
            span.rows += len(group)

    def _read(self, prompts: list[list[int]]) -> None:
        width = len(prompts[0]) - 1
        if width:
            rows = [p[:-1] + self.pad * (width + 1 - len(p)) for p in prompts]
            ids = torch.tensor(rows, device=self.model.device)  # [B, T]
            _last_logits(self.model, ids, self.cache, None, torch.arange(width, device=ids.device)[None])

    def step(self, ids: list[int], positions: list[int]) -> Tensor:
        device = self.model.device
        new, columns = (torch.tensor(values, device=device)[:, None] for values in (ids, positions))  # [B, 1]
        self.span.cells, self.span.length = (torch.arange(len(ids), device=device), columns[:, 0]), max(positions) + 1
        seen = torch.arange(self.span.length, device=device) <= columns  # [B, L]
        # Additive and with all four dimensions it is used as it is; else every step would wait for the device to see
        # whether anything is masked, and on a CPU in bfloat16 attention without a mask is five times slower.
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=device).masked_fill(~seen, -torch.inf)
        return _last_logits(self.model, new, self.cache, mask[:, None, None], columns)

    def keep(self, order: list[int]) -> None:
        places = [i for i, row in enumerate(order) if i != row]
        if places:
            for layer in self.layers:
                layer.move([order[i] for i in places], places)
        self.span.rows = len(order)


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
            _last_logits(self.model, ids, self.cache, self.mask, positions)

    def step(self, ids: list[int], positions: list[int]) -> Tensor:
        device = self.model.device
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(ids), 1))], dim=-1)
        new, columns = (torch.tensor(values, device=device)[:, None] for values in (ids, positions))  # [B, 1]
        return _last_logits(self.model, new, self.cache, self.mask, columns)

    def keep(self, order: list[int]) -> None:
        rows = torch.tensor(order, dtype=torch.long, device=self.model.device)
        self.mask = self.mask[rows]
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
