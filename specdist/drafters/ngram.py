"""Owns drafting without a model: what followed the last tokens where they stood before in the same text.

Prompt lookup (Saxena 2023): much of an answer to a question about a text, and of an edited program, is a copy.
"""

from collections.abc import Sequence

import torch

from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.one_by_one import OneByOne
from specdist.errors import ConfigError
from specdist.tree import DraftTree


class NgramDrafter:
    """Proposes what followed the last occurrence of the longest known suffix of the text, else nothing.

    Suffixes of `max_ngram` down to `min_ngram` tokens are looked for. Raises ConfigError where these are out of order.
    """

    max_draft_tokens: int | None = None
    tree: DraftTree | None = None

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"n-grams of {min_ngram} to {max_ngram} tokens: expected 1 ≤ min_ngram ≤ max_ngram")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.reset()

    def reset(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # by n-gram: position of the token after its last occurrence
        self._num_indexed = 0

    def lookup(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What may follow `token_ids`, a text that only grows between calls of `reset`: `max_tokens` ids, or none.

        Where the earlier occurrence reaches up to the end, the text is taken to repeat from there.
        """
        for end in range(self._num_indexed, len(token_ids)):
            for size in self.sizes:
                if size <= end:
                    self._following[tuple(token_ids[end - size : end])] = end
        self._num_indexed = len(token_ids)
        for size in self.sizes:
            start = self._following.get(tuple(token_ids[-size:]))
            if start is not None and size <= len(token_ids):
                found = token_ids[start : start + max_tokens]
                return [found[i % len(found)] for i in range(max_tokens)]
        return []

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        return Proposal(torch.tensor(self.lookup(context.token_ids, max_tokens), dtype=torch.long))

    def commit(self, num_committed: int, target_hidden: torch.Tensor) -> None:
        """Nothing: the text itself is all that is looked at."""

    def batched(self, count: int, width: int) -> OneByOne:
        return OneByOne([NgramDrafter(self.sizes[0], self.sizes[-1]) for _ in range(count)])
