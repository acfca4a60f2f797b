"""Owns how a drafter takes its next token from its logits: the best or a drawn one, and whether to draft on after it.

Shapes: R ids that the draft may propose.
"""

from typing import NamedTuple

from torch import Tensor

from specdist.drafters.base import DecodeContext
from specdist.verify import sample, served_probs


class Drawn(NamedTuple):
    """A drafted token's column in the logits; what it was drawn from, [R], None for the best; whether to go on."""

    column: Tensor  # []
    probs: Tensor | None
    go_on: bool


def draw_token(logits: Tensor, context: DecodeContext) -> Drawn:
    """Take a token from `logits` [R] as `context` says.

    A block ends after a token that the draft gives less than `context.confidence_threshold`, and not before it: whether
    a drawn token is verified must not depend on which it is, or the output is no longer distributed as the target's.
    """
    if context.draft_sampling is None:
        column, probs = logits.argmax(), None
    else:
        probs = served_probs(logits, context.draft_sampling)
        column = sample(probs, context.generator)
    if not context.confidence_threshold:
        return Drawn(column, probs, True)
    confidence = (logits[column] - logits.logsumexp(dim=-1)).exp() if probs is None else probs[column]
    return Drawn(column, probs, float(confidence) >= context.confidence_threshold)
