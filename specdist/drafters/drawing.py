"""Owns how a drafter takes next tokens from its logits: the best or drawn ones, and whether to draft on after each.

Shapes: B rows of text, R ids that the draft may propose.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdist.drafters.base import DecodeContext
from specdist.verify import draw, served_probs, uniform_numbers


class _Drawn(NamedTuple):
    """Drafted tokens' columns in the logits; what they were drawn from, [B, R], None for the best; whether to go on."""

    columns: Tensor  # [B]
    probs: Tensor | None
    go_on: list[bool]


def _draw(logits: Tensor, contexts: Sequence[DecodeContext]) -> _Drawn:
    """Take a token from each row of `logits` [B, R] as `contexts` say, drawing with each row's own generator."""
    sampling, threshold = contexts[0].draft_sampling, contexts[0].confidence_threshold
    if sampling is None:
        columns, probs = logits.argmax(dim=-1), None
    else:
        probs = served_probs(logits, sampling)
        columns = draw(probs, torch.cat([uniform_numbers((1,), context.generator) for context in contexts]))
    if not threshold:
        return _Drawn(columns, probs, [True] * len(contexts))
    own = (logits if probs is None else probs).gather(-1, columns[:, None])[:, 0]  # [B]
    confidence = (own - logits.logsumexp(dim=-1)).exp() if probs is None else own
    return _Drawn(columns, probs, (confidence >= threshold).tolist())


class Blocks:
    """The blocks of some texts while they are drafted token by token, each to its own length.

    A block ends after a token that the draft gives less than `confidence_threshold`, and not before it: whether a drawn
    token is verified must not depend on which it is, or the output is no longer distributed as the target's.
    `drafting`: the texts, by number, whose blocks go on; `lengths`: how long each block is by now.
    """

    def __init__(self, contexts: Sequence[DecodeContext], max_tokens: Sequence[int]) -> None:
        self.contexts, self.max_tokens = contexts, max_tokens
        self.drafting = [row for row, most in enumerate(max_tokens) if most > 0]
        self.lengths = [0] * len(contexts)
        self._probs: list[list[Tensor]] = [[] for _ in contexts]

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of each text in `drafting`, from its row of `logits` [drafting, R]: columns [drafting]."""
        drawn = _draw(logits, [self.contexts[row] for row in self.drafting])
        going = []
        for i, row in enumerate(self.drafting):
            self.lengths[row] += 1
            if drawn.probs is not None:
                self._probs[row].append(drawn.probs[i])
            if drawn.go_on[i] and self.lengths[row] < self.max_tokens[row]:
                going.append(row)
        self.drafting = going
        return drawn.columns

    def probs(self, row: int) -> Tensor | None:
        """What the tokens of a block were drawn from, [N, R]; None where they were not drawn, or there are none."""
        return torch.stack(self._probs[row]) if self._probs[row] else None
