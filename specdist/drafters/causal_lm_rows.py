"""Owns drafting for several texts at once with a causal LM: one pass for all of them, on one cache written in place.

Shapes: B texts, T tokens fed to each, N drafted tokens, R ids that the draft may propose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.drawing import Blocks
from specdist.drafters.vocabulary import DraftVocabulary
from specdist.in_place import InPlaceBatch
from specdist.tree import DraftTree


def block_proposal(token_ids: Tensor, probs: Tensor | None, vocabulary: DraftVocabulary) -> Proposal:
    """A chain of `token_ids` [N], drawn from `probs` [N, R] or None, over the target's vocabulary."""
    return Proposal(token_ids, None if probs is None else vocabulary.spread(probs))


class DraftModelRows:
    """Drafts token by token; a text that has its block waits for the others. For a model that `fits_in_place`."""

    max_draft_tokens: int | None = None
    tree: DraftTree | None = None

    def __init__(self, model: PreTrainedModel, vocabulary: DraftVocabulary, count: int, width: int) -> None:
        """`vocabulary`: on the model's device, an id for each of its logits (`fitted_vocabulary`)."""
        self.vocabulary, self.width = vocabulary, width
        self.batch = InPlaceBatch(model, pad_token_id=0)
        self.num_fed = [0] * count
        self._has_read = False

    @torch.inference_mode()
    def propose_rows(
        self, contexts: Sequence[DecodeContext], newest_hidden: Sequence[Tensor], max_tokens: Sequence[int]
    ) -> list[Proposal]:
        texts, blocks = [list(context.token_ids) for context in contexts], Blocks(contexts, max_tokens)
        # What was rejected is written over; the newest token has not been fed.
        self.num_fed = [min(fed, len(text) - 1) for fed, text in zip(self.num_fed, texts, strict=True)]
        while rows := blocks.drafting:
            ids = self.vocabulary.ids[blocks.draw(self._logits(texts, rows))]
            for row, token in zip(rows, ids.tolist(), strict=True):
                texts[row].append(token)
        return [
            block_proposal(
                torch.tensor(text[len(context.token_ids) :], dtype=torch.long), blocks.probs(row), self.vocabulary
            )
            for row, (text, context) in enumerate(zip(texts, contexts, strict=True))
        ]

    def _logits(self, texts: list[list[int]], rows: list[int]) -> Tensor:
        """Next-token logits [rows, R] after feeding to all texts what is not cached yet, or the last token again."""
        if not self._has_read:
            self.batch.join(texts, len(texts), self.width)
            self.num_fed, self._has_read = [len(text) - 1 for text in texts], True
        starts = [min(fed, len(text) - 1) for fed, text in zip(self.num_fed, texts, strict=True)]
        fresh = [text[start:] for text, start in zip(texts, starts, strict=True)]
        last = [len(tokens) - 1 for tokens in fresh]  # of each text's logits those after its last token alone
        kept = sorted(set(last))
        options = {"logits_to_keep": torch.tensor(kept, device=self.vocabulary.ids.device)} if max(last) else {}
        logits = self.batch.feed(fresh, starts, **options).logits  # [B, kept, at least R]
        self.num_fed = [len(text) for text in texts]
        return logits[rows, [kept.index(last[row]) for row in rows], : len(self.vocabulary)].float()

    def keep_rows(self, order: list[int]) -> None:
        self.num_fed = [self.num_fed[row] for row in order]
        if self._has_read:
            self.batch.keep(order)
