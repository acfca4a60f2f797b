"""Owns drafting with heads: a chain of each head's best or drawn token, or a tree of a few of them.

Shapes: B texts, N nodes, D hidden size, V vocabulary; of one level of a tree: P nodes of the level before that have
children, S nodes, K candidates of each parent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.drawing import Blocks
from specdist.drafters.heads import HeadsOnTarget
from specdist.tree import DraftTree, candidates
from specdist.verify import sample_candidates, served_probs, uniform_numbers


@dataclass(frozen=True)
class _Level:
    """One level of a tree: its parents' numbers in the level before, then each node's parent among them and rank."""

    parents: Tensor  # [P]
    parent: Tensor  # [S]
    rank: Tensor  # [S]
    num_candidates: int


def _levels(tree: DraftTree, device: torch.device) -> list[_Level]:
    levels: list[_Level] = []
    start, before = 0, -1
    for size in tree.level_sizes:
        numbers = [parent - before for parent in tree.parents[start : start + size]]
        ranks = [path[-1] for path in tree.paths[start : start + size]]
        parents = sorted(set(numbers))
        parent = torch.tensor([parents.index(number) for number in numbers], device=device)
        levels.append(
            _Level(torch.tensor(parents, device=device), parent, torch.tensor(ranks, device=device), max(ranks) + 1)
        )
        start, before = start + size, start
    return levels


class HeadsDrafter:
    """Drafts from the hidden state that produced the newest token: each head's best token, or the nodes of `tree`.

    Raises ConfigError where the tree has more levels than there are heads.
    """

    def __init__(self, heads: HeadsOnTarget, tree: DraftTree | None = None) -> None:
        self.heads = heads
        self.tree = None if tree is None else DraftTree.of(tree.paths, heads.num_heads)
        self.max_draft_tokens: int | None = heads.num_heads if tree is None else tree.depth
        self.hidden: Tensor | None = None
        if self.tree is not None:
            self.levels, self.parents = _levels(self.tree, heads.device), torch.tensor(self.tree.parents)

    def reset(self) -> None:
        self.hidden = None

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        if self.hidden is None:
            raise ValueError("propose before commit: the heads need the state that produced the newest token")
        return self.propose_rows([context], [self.hidden], [max_tokens])[0]

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        self.hidden = target_hidden

    def batched(self, count: int, width: int) -> "HeadsDrafter":
        """This one itself: of several texts nothing is kept from one block to the next."""
        return self

    def keep_rows(self, order: list[int]) -> None:
        """Nothing is kept."""

    @torch.inference_mode()
    def propose_rows(
        self, contexts: Sequence[DecodeContext], newest_hidden: Sequence[Tensor], max_tokens: Sequence[int]
    ) -> list[Proposal]:
        if not any(max_tokens):
            return [Proposal(torch.empty(0, dtype=torch.long)) for _ in contexts]
        hidden = torch.stack(list(newest_hidden))  # [B, D]
        newest = torch.tensor([context.token_ids[-1:] for context in contexts], device=self.heads.device)  # [B, 1]
        draft = self._chain if self.tree is None else self._tree
        return draft(hidden, newest, contexts, [min(length, self.max_draft_tokens or length) for length in max_tokens])

    def _logits(self, hidden: Tensor, count: int) -> Callable[[int, Tensor], Tensor]:
        """How the first `count` heads are asked: the head and paths of tokens [B, P, head + 1] → [B, P, V].

        Heads that do not see the draft are asked all at once, and answer all paths of a text alike: [B, 1, V].
        """
        if not self.heads.sees_draft:
            ahead = self.heads.logits_ahead(hidden, count)  # [count, B, V]
            return lambda index, paths: ahead[index][:, None]

        def ask(index: int, paths: Tensor) -> Tensor:
            states = hidden.repeat_interleave(paths.shape[1], dim=0)  # [B · P, D]
            return self.heads.logits(index, states, paths.flatten(0, 1)).unflatten(0, paths.shape[:2])

        return ask

    def _chain(
        self, hidden: Tensor, newest: Tensor, contexts: Sequence[DecodeContext], lengths: Sequence[int]
    ) -> list[Proposal]:
        """Head by head; the path of a text that has its block goes on with any token, of which nothing is told."""
        paths, blocks, head = newest, Blocks(contexts, lengths), 0  # [B, head + 1]: the newest token, then the drafts
        logits_of = self._logits(hidden, max(lengths))
        while rows := blocks.drafting:
            logits, some = logits_of(head, paths[:, None])[:, 0], len(rows) < len(contexts)  # [B, V]
            tokens = blocks.draw(logits[rows] if some else logits)
            if some:
                tokens = newest[:, 0].index_put((torch.tensor(rows),), tokens)
            paths, head = torch.cat([paths, tokens[:, None]], dim=-1), head + 1
        return [
            Proposal(path[1 : length + 1], blocks.probs(row))
            for row, (path, length) in enumerate(zip(paths, blocks.lengths, strict=True))
        ]

    def _tree(
        self, hidden: Tensor, newest: Tensor, contexts: Sequence[DecodeContext], lengths: Sequence[int]
    ) -> list[Proposal]:
        """Level by level. Heads that see the draft are asked once for each parent, others once for all."""
        paths, tokens, probs = newest[:, None], [], []
        logits_of = self._logits(hidden, max(lengths))
        # paths [B, S, level + 1]: the tokens down to each node, the newest of the text first
        for index, level in enumerate(self.levels[: max(lengths)]):
            paths = paths[:, level.parents]
            logits = logits_of(index, paths)  # [B, P or 1, V]
            if (sampling := contexts[0].draft_sampling) is None:
                best = candidates(logits.flatten(0, 1), level.num_candidates).unflatten(0, logits.shape[:2])
                chosen = best.expand(-1, paths.shape[1], -1)  # [B, P, K]
            else:
                served = served_probs(logits, sampling).expand(-1, paths.shape[1], -1)  # [B, P, V]
                uniforms = _uniforms(contexts, lengths, index, (paths.shape[1], level.num_candidates))
                ids, drawn_from = sample_candidates(served.flatten(0, 1), uniforms.flatten(0, 1))
                chosen = ids.unflatten(0, served.shape[:2])
                probs.append(drawn_from.unflatten(0, served.shape[:2])[:, level.parent, level.rank])  # [B, S, V]
            tokens.append(chosen[:, level.parent, level.rank])  # [B, S]
            paths = torch.cat([paths[:, level.parent], tokens[-1][..., None].clamp(min=0)], dim=-1)
        drafted, drawn = torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if probs else None
        return [
            self._of_levels(length, ids, drawn, row)
            for row, (length, ids) in enumerate(zip(lengths, drafted, strict=True))
        ]

    def _of_levels(self, length: int, ids: Tensor, drawn: Tensor | None, row: int) -> Proposal:
        """A text's first so many levels of `ids` [N], of what they were drawn from [B, N, V] its row."""
        if not length:
            return Proposal(ids[:0])
        count = sum(self.tree.level_sizes[:length]) if self.tree else 0
        return Proposal(ids[:count], None if drawn is None else drawn[row, :count], self.parents[:count])


def _uniforms(contexts: Sequence[DecodeContext], lengths: Sequence[int], index: int, shape: tuple[int, int]) -> Tensor:
    """[B, P, K] for one level, of each text from its own generator; one that has no such level draws nothing."""
    return torch.stack(
        [
            uniform_numbers(shape, context.generator)
            if index < length
            else torch.zeros(shape, dtype=torch.float64, device=context.generator.device)
            for context, length in zip(contexts, lengths, strict=True)
        ]
    )
