"""Owns the interface between the decoding loop and anything that drafts. Nothing else, which keeps the package acyclic.

Shapes: N drafted tokens of a block, V vocabulary, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdist.schema import SamplingSpec
from specdist.tree import DraftTree


@dataclass(frozen=True)
class DecodeContext:
    """What a drafter may see: all committed tokens (prompt and output) and how its drafts are drawn.

    `draft_sampling` None means greedy drafts (argmax, one-hot in verification); else drafts are sampled from it. A
    chain ends after a token to which the draft gives a probability below `confidence_threshold`; 0 is off.
    """

    token_ids: list[int]
    draft_sampling: SamplingSpec | None
    generator: torch.Generator
    confidence_threshold: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens: a chain, or with `parents` a tree, level by level. `probs` None means deterministic drafts.

    `probs`: what each was drawn from; in a tree given the siblings before it, and id −1 where there was none to draw.
    """

    token_ids: Tensor  # [N]
    probs: Tensor | None = None  # [N, V]
    parents: Tensor | None = None  # [N], −1 is a child of the newest committed token


class Drafter(Protocol):
    """Proposes a block, and is told what became of it. `max_draft_tokens` of a tree is its depth."""

    max_draft_tokens: int | None
    tree: DraftTree | None  # None for a drafter of chains

    def reset(self) -> None:
        """Forget the last text; the next `propose` starts another."""

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        """Draft at most `max_tokens` (≥ 1) tokens that follow `context.token_ids`; of a tree so many levels."""

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        """Learn that the text now holds `num_committed` tokens.

        `target_hidden` [D]: the target's final hidden state (after the norm) that produced the newest token.
        """

    def batched(self, count: int, width: int) -> "BatchDrafter":
        """A drafter for `count` texts of at most `width` tokens, all at their beginning; this one stays as it is."""


class BatchDrafter(Protocol):
    """Proposes blocks for several texts at once. All contexts draw their drafts alike, each from its generator."""

    max_draft_tokens: int | None
    tree: DraftTree | None

    def propose_rows(
        self, contexts: Sequence[DecodeContext], newest_hidden: Sequence[Tensor], max_tokens: Sequence[int]
    ) -> list[Proposal]:
        """For each text what `Drafter.commit` and then `propose` would; no draft where its `max_tokens` is 0.

        `newest_hidden`: for each text the target's final hidden state [D] that produced the newest token.
        """

    def keep_rows(self, order: list[int]) -> None:
        """Go on with these texts alone, in this order."""
