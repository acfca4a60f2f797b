"""Owns the key-value cache of a running batch that is written in place: rows join, take steps, are cut short, leave.

Shapes: B rows in use, R places for rows, W tokens of a place, T tokens fed to a row at once, L longest text in use,
H key-value heads, D head dimension, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from specdist.target import cache_argument

READ_TOKENS = 4096  # of prompts in one pass, padding included: bounds what the pass needs beside the cache
PADDING = 16  # tokens of a prompt that are cheaper than another pass
WIDTH_STEP = 32  # tokens: the room of a row is rounded up to these, so that the cache is seldom laid out anew


def fits_in_place(model: PreTrainedModel) -> bool:
    """Whether `InPlaceBatch` is right for the model: every layer attends to all tokens, as a mask says."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    implementation = model.config.get_text_config()._attn_implementation
    return (
        kinds == {DynamicLayer}
        and implementation in ("sdpa", "eager")
        and model.is_backend_compatible()  # passes on a mask that is made here
        and _takes(model, "position_ids")
    )


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def forward(
    model: PreTrainedModel, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, **options: Any
) -> Any:
    """The model's output for `ids` [B, T] at `positions`, which follow what the cache holds.

    `options`: what the model's forward takes besides; one that it does not know is left out.
    """
    options = {"position_ids": positions, **options}
    options = {name: value for name, value in options.items() if name == "output_hidden_states" or _takes(model, name)}
    options[cache_argument(model)] = cache
    return model(input_ids=ids, attention_mask=mask, use_cache=True, **options)


def without(done: Sequence[int], count: int) -> list[int]:
    """Order of `count` rows without `done`, where rows from the end take the places that become free."""
    kept = count - len(done)
    spare = iter(sorted(set(range(kept, count)).difference(done)))
    return [next(spare) if i in done else i for i in range(kept)]


def _similar(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Split prompts where padding to the longest wastes a quarter of one, or a pass would become too large."""
    start = 0
    for end in range(1, len(prompts) + 1):
        longest = max(map(len, prompts[start:end]))
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
    # rows [B, 1] and columns [B, T] of the tokens that are fed; None: prompts, after B
    cells: tuple[Tensor, Tensor] | None = None

    @property
    def num_fed(self) -> int:
        """T"""
        return 0 if self.cells is None else self.cells[1].shape[1]


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

    def move_tokens(self, rows: list[int], sources: list[int], columns: list[int]) -> None:
        """Copy tokens of these rows to other columns, all at once."""
        for states in (self.keys, self.values):
            if states is not None:
                states[rows, :, columns] = states[rows, :, sources]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] of prompts or of a step; gives what the new tokens attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, states: Any, new: Tensor) -> Tensor:
        count, _, tokens, _ = new.shape
        if self.span.cells is None:
            states[self.span.rows : self.span.rows + count, :, :tokens] = new
            return new
        rows, columns = (indexes.to(new.device) for indexes in self.span.cells)
        states[rows, :, columns] = new.transpose(1, 2)  # [B, T, H, D]
        return states[:count, :, : self.span.length]

    def get_seq_length(self) -> int:
        """Tokens before the new ones. A row may have fewer: the mask says."""
        return self.span.length - self.span.num_fed if self.span.cells is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the new tokens meet, and the column of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.span.width


class InPlaceBatch:
    """A batch whose rows have places of their own, so that rows join and leave while others are written.

    Nothing is concatenated or shifted. Padding is to the right of a text, where no token sees it. How long a row is the
    caller says with every step: what it held beyond is overwritten, so a row is cut short by going on from there.
    """

    joins_midway = True

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self.model = model
        self.pad = [pad_token_id]
        self.span = _Span()
        self.layers: list[Any] = [_InPlaceLayer(self.span) for _ in DynamicCache(config=model.config).layers]
        self.cache = Cache(layers=self.layers)

    def join(self, prompts: list[list[int]], places: int, width: int) -> None:
        """Read `prompts` up to their last tokens, as rows after those in use. Longest first they need least padding."""
        span = self.span
        if span.rows + len(prompts) > span.places or width > span.width:
            self._resize(places, width)
        span.cells = None
        for group in _similar(prompts):
            self._read(group)
            span.rows += len(group)
        span.length = max(span.length, *(len(prompt) - 1 for prompt in prompts))

    def _resize(self, places: int, width: int) -> None:
        self.span.places, self.span.width = places, width
        for layer in self.layers:
            layer.resize()

    def _read(self, prompts: list[list[int]]) -> None:
        width = max(map(len, prompts)) - 1
        if width:
            rows = [p[:-1] + self.pad * (width + 1 - len(p)) for p in prompts]
            ids = torch.tensor(rows, device=self.model.device)  # [B, T]
            positions = torch.arange(width, device=ids.device)[None]
            forward(self.model, ids, self.cache, None, positions, logits_to_keep=1)

    def step(self, ids: list[int], positions: list[int]) -> Tensor:
        """Append one token to every row, the `positions`-th of its text: logits of the next one [B, V]."""
        return self.feed([[token] for token in ids], positions, logits_to_keep=1).logits[:, -1]

    def feed(self, ids: list[list[int]], starts: list[int], *, visible: Tensor | None = None, **options: Any) -> Any:
        """Feed a block of tokens to every row, as the tokens of its text from number `starts[b]` on.

        Blocks may differ in length: shorter ones are padded at their end, to T. `visible` [T, T], bool: which tokens of
        a block see which (`tree.block_attention`), None for a chain. `options` go to the model's forward; its output
        is for [B, T] tokens.
        """
        device, width = self.model.device, max(map(len, ids))
        block = torch.tensor([row + self.pad * (width - len(row)) for row in ids], device=device)  # [B, T]
        first = torch.tensor(starts, device=device)[:, None]  # [B, 1]
        order = torch.arange(width, device=device)
        depth = order if visible is None else visible.sum(dim=-1).to(device) - 1  # [T]
        real = order < torch.tensor([len(row) for row in ids], device=device)[:, None]  # [B, T]
        length = max(starts) + width
        if length > self.span.width:
            self._resize(self.span.places, -(-length // WIDTH_STEP) * WIDTH_STEP)
        self.span.cells, self.span.length = (torch.arange(len(ids), device=device)[:, None], first + order), length
        mask = _mask(first, length, order if visible is None else visible.to(device), self.model.dtype)
        # padding stands at the block's start: a position beyond the model's last would be an error
        return forward(self.model, block, self.cache, mask, first + depth * real, **options)

    def move_tokens(self, moves: list[tuple[int, int, int]]) -> None:
        """Copy tokens (row, from column, to column), all at once: of a tree's nodes those on the accepted path."""
        if moves:
            rows, sources, columns = (list(numbers) for numbers in zip(*moves, strict=True))
            for layer in self.layers:
                layer.move_tokens(rows, sources, columns)

    def keep(self, order: list[int]) -> None:
        """Keep these rows alone, in this order; the first of them stay where they are as far as `order` allows."""
        places = [i for i, row in enumerate(order) if i != row]
        if places:
            for layer in self.layers:
                layer.move([order[i] for i in places], places)
        self.span.rows = len(order)


def _mask(first: Tensor, length: int, block: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, L]: a token sees the text before its block, and of that what `block` says.

    `first` [B, 1]: columns of the blocks' first tokens; `block`: numbers [T] of a chain, or what sees what [T, T].
    Additive and with all four dimensions it is used as it is; else every step would wait for the device to see whether
    anything is masked, and on a CPU in bfloat16 attention without a mask is five times slower.
    """
    number = (torch.arange(length, device=first.device) - first)[:, None]  # [B, 1, L], of each column in the block
    if block.dim() == 1:
        seen = number <= block[:, None]  # [B, T, L]
    else:
        within = block[:, number[:, 0].clamp(0, len(block) - 1)].transpose(0, 1)  # [T, B, L] → [B, T, L]
        seen = (number < 0) | ((number < len(block)) & within)
    mask = torch.zeros(seen.shape, dtype=dtype, device=first.device)
    return mask.masked_fill(~seen, -torch.inf)[:, None]
