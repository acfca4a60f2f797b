"""Owns drafting for several texts with a drafter for each, one after the other: right for every drafter of one text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdist.drafters.base import DecodeContext, Drafter, Proposal

_NO_DRAFT = Proposal(torch.empty(0, dtype=torch.long))


class OneByOne:
    """A batch drafter of drafters that each have one text, at its beginning, and share no state."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.max_draft_tokens, self.tree = drafters[0].max_draft_tokens, drafters[0].tree

    def propose_rows(
        self, contexts: Sequence[DecodeContext], newest_hidden: Sequence[Tensor], max_tokens: Sequence[int]
    ) -> list[Proposal]:
        return [_propose(*row) for row in zip(self.drafters, contexts, newest_hidden, max_tokens, strict=True)]

    def keep_rows(self, order: list[int]) -> None:
        self.drafters = [self.drafters[i] for i in order]


def _propose(drafter: Drafter, context: DecodeContext, newest_hidden: Tensor, max_tokens: int) -> Proposal:
    """A block of at most `max_tokens`. What became of the last one the drafter learns in any case."""
    drafter.commit(len(context.token_ids), newest_hidden)
    return drafter.propose(context, max_tokens) if max_tokens else _NO_DRAFT
