"""Owns the target at work on rows of text: one pass over a block of each, verified, the accepted tokens kept cached.

Shapes: B rows, N drafted tokens of a block, T = N + 1 tokens with the newest, V vocabulary, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdist.decoding.decoded import Text, Verified
from specdist.drafters.base import Proposal
from specdist.in_place import WIDTH_STEP, InPlaceBatch
from specdist.schema import SamplingSpec
from specdist.target import forward_block, keep_fed, new_cache
from specdist.tree import block_attention
from specdist.verify import TypicalAcceptance, uniform_numbers, verify

NO_DRAFT, _NO_NUMBERS = Proposal(torch.empty(0, dtype=torch.long)), torch.empty(0, dtype=torch.float64)


class TargetRows(Protocol):
    """The target and its cache of the texts that are being decoded."""

    def read(self, texts: Sequence[Text]) -> list[Verified]:
        """Feed the prompts, which gives the first token of each."""

    def check(self, texts: Sequence[Text], proposals: Sequence[Proposal]) -> list[Verified]:
        """Feed the newest token of each text and its drafts; the cache keeps those that are accepted."""

    def keep(self, order: list[int]) -> None:
        """Go on with these texts alone, in this order."""


@dataclass(frozen=True)
class Rule:
    """By what drafts are accepted: verify.py says how. Each row draws from its own generator, as often as alone."""

    sampling: SamplingSpec
    typical: TypicalAcceptance | None = None

    def decide(
        self, logits: Tensor, proposals: Sequence[Proposal], generators: Sequence[torch.Generator]
    ) -> list[tuple[list[int], int]]:
        """Each row's accepted drafts by number, and the target's token after them. `logits` [B, N + 1, V].

        Rows with fewer drafts than N are padded with id −1, which is no token and never accepted; the parents of a tree
        are the first of those that the largest has.
        """
        ids = pad_sequence([p.token_ids for p in proposals], True, -1).to(logits.device)  # [B, N]
        probs = None
        if drawn := [p.probs for p in proposals if p.probs is not None]:
            empty = drawn[0].new_zeros(0, drawn[0].shape[1])
            probs = pad_sequence([empty if p.probs is None else p.probs for p in proposals], True)  # [B, N, V]
        parents = max(proposals, key=lambda p: len(p.token_ids)).parents
        last, following = verify(
            logits,
            ids,
            probs,
            parents,
            self.sampling,
            self._uniforms(proposals, generators).to(logits.device),
            self.typical,
        )
        above = None if parents is None else parents.tolist()
        nodes, tokens = torch.stack([last, following]).tolist()
        return [(_path(node, above), token) for node, token in zip(nodes, tokens, strict=True)]

    def _uniforms(self, proposals: Sequence[Proposal], generators: Sequence[torch.Generator]) -> Tensor:
        """[B, N + 1]: one number for each of a row's drafts in its place, and one for its own token, in the last too.

        Rules look for the latter in the last place, or after the draft that was accepted last.
        """
        if self.sampling.is_greedy:
            return _NO_NUMBERS
        own = [
            uniform_numbers((len(p.token_ids) + 1,), generator)
            for p, generator in zip(proposals, generators, strict=True)
        ]
        rows = pad_sequence(own, True)
        rows[:, -1] = torch.stack([numbers[-1] for numbers in own])
        return rows


def _path(node: int, parents: list[int] | None) -> list[int]:
    """The nodes from the top down to `node`, none for −1; of a chain where there are no `parents`."""
    if parents is None:
        return list(range(node + 1))
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _draft_ids(proposal: Proposal) -> list[int]:
    return [max(token, 0) for token in proposal.token_ids.tolist()]  # where there was none to draw: any


def _verified(draft_ids: list[int], decided: tuple[list[int], int], num_levels: int, hidden: Tensor) -> Verified:
    """`hidden` [T, D] of the block."""
    accepted, following = decided
    token_ids = [*(draft_ids[node] for node in accepted), following]
    return Verified(token_ids, len(accepted), num_levels, hidden[accepted[-1] + 1 if accepted else 0])


class SingleRow:
    """One text, on transformers' own cache: right for every kind of layer that can take tokens back."""

    def __init__(self, model: PreTrainedModel, rule: Rule) -> None:
        self.model, self.rule, self.cache = model, rule, new_cache(model)

    def read(self, texts: Sequence[Text]) -> list[Verified]:
        (text,) = texts
        hidden, logits = forward_block(self.model, text.token_ids, self.cache, logits_to_keep=1)
        (decided,) = self.rule.decide(logits[None], [NO_DRAFT], [text.context.generator])
        return [_verified([], decided, 0, hidden[-1:])]

    def check(self, texts: Sequence[Text], proposals: Sequence[Proposal]) -> list[Verified]:
        (text,), (proposal,) = texts, proposals
        draft_ids = _draft_ids(proposal)
        visible = None if proposal.parents is None else block_attention(proposal.parents)  # [T, T]
        hidden, logits = forward_block(self.model, [text.token_ids[-1], *draft_ids], self.cache, visible=visible)
        (decided,) = self.rule.decide(logits[None], proposals, [text.context.generator])
        keep_fed(self.cache, len(draft_ids), decided[0])
        num_levels = len(draft_ids) if visible is None else int(visible.sum(dim=-1).max()) - 1
        return [_verified(draft_ids, decided, num_levels, hidden)]

    def keep(self, order: list[int]) -> None:
        """Nothing: there is one."""


class ManyRows:
    """Several texts, of any lengths, in one pass each step: for a model that `fits_in_place`."""

    def __init__(self, model: PreTrainedModel, rule: Rule) -> None:
        self.rule, self.batch = rule, InPlaceBatch(model, pad_token_id=0)

    def read(self, texts: Sequence[Text]) -> list[Verified]:
        """`texts` longest first. A prompt is read up to its last token; the pass over that is as any other."""
        longest = max(text.most_tokens for text in texts)
        self.batch.join([text.token_ids for text in texts], len(texts), -(-longest // WIDTH_STEP) * WIDTH_STEP)
        return self.check(texts, [NO_DRAFT] * len(texts))

    def check(self, texts: Sequence[Text], proposals: Sequence[Proposal]) -> list[Verified]:
        parents = max(proposals, key=lambda p: len(p.token_ids)).parents
        visible = None if parents is None else block_attention(parents)  # [T, T]
        drafts, starts = [_draft_ids(p) for p in proposals], [len(text.token_ids) - 1 for text in texts]
        blocks = [[text.token_ids[-1], *ids] for text, ids in zip(texts, drafts, strict=True)]
        output = self.batch.feed(blocks, starts, visible=visible, output_hidden_states=True)
        hidden = output.hidden_states[-1]  # [B, T, D]
        decided = self.rule.decide(output.logits, proposals, [text.context.generator for text in texts])
        self._keep_path([nodes for nodes, _ in decided], starts)
        levels = [len(ids) if visible is None else int(visible[: len(ids) + 1].sum(-1).max()) - 1 for ids in drafts]
        return [_verified(*of) for of in zip(drafts, decided, levels, hidden, strict=True)]

    def _keep_path(self, paths: Sequence[list[int]], starts: Sequence[int]) -> None:
        """Move the accepted nodes of a tree up to the text; what lies beyond is overwritten by the next block."""
        self.batch.move_tokens(
            [
                (row, start + 1 + node, start + 1 + depth)
                for row, (path, start) in enumerate(zip(paths, starts, strict=True))
                for depth, node in enumerate(path)
                if node != depth
            ]
        )

    def keep(self, order: list[int]) -> None:
        self.batch.keep(order)
