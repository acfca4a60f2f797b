"""Owns drafting with heads: a chain of each head's best or drawn token, or a tree of a few of them.

Shapes: N nodes, D hidden size, V vocabulary; of one level of a tree: P nodes of the level before that have children,
S nodes, K candidates of each parent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.drawing import draw_token
from specdist.drafters.heads import HeadsOnTarget
from specdist.tree import DraftTree, candidates
from specdist.verify import sample_candidates, served_probs


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

    @torch.inference_mode()
    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        if self.hidden is None:
            raise ValueError("propose before commit: the heads need the state that produced the newest token")
        newest = torch.tensor([context.token_ids[-1:]], device=self.heads.device)
        if self.tree is None:
            return self._chain(self.hidden, newest, context, max_tokens)
        return self._tree(self.hidden, newest, context, max_tokens)

    def _logits(self, hidden: Tensor, count: int) -> Callable[[int, Tensor], Tensor]:
        """How the first `count` heads are asked: the head and paths of tokens [P, head + 1] → [P, V].

        Heads that do not see the draft are asked all at once, and answer all paths alike: [1, V].
        """
        if self.heads.sees_draft:
            return lambda index, paths: self.heads.logits(index, hidden.expand(len(paths), -1), paths)
        ahead = self.heads.logits_ahead(hidden[None], count)  # [count, 1, V]
        return lambda index, paths: ahead[index]

    def _chain(self, hidden: Tensor, newest: Tensor, context: DecodeContext, max_tokens: int) -> Proposal:
        path, probs, count = newest, [], min(max_tokens, self.heads.num_heads)
        logits_of = self._logits(hidden, count)
        for index in range(count):
            logits = logits_of(index, path)  # [1, V]
            drawn = draw_token(logits[0], context)
            path = torch.cat([path, drawn.column[None, None]], dim=-1)
            if drawn.probs is not None:
                probs.append(drawn.probs)
            if not drawn.go_on:
                break
        return Proposal(path[0, 1:], torch.stack(probs) if probs else None)

    def _tree(self, hidden: Tensor, newest: Tensor, context: DecodeContext, max_tokens: int) -> Proposal:
        """Level by level. Heads that see the draft are asked once for each parent, others once for all."""
        paths, tokens, probs = newest, [], []
        logits_of = self._logits(hidden, min(max_tokens, len(self.levels)))
        # paths [S, level + 1]: the tokens down to each node, the newest of the text first
        for index, level in enumerate(self.levels[:max_tokens]):
            paths = paths[level.parents]
            logits = logits_of(index, paths)  # [P or 1, V]
            if context.draft_sampling is None:
                chosen = candidates(logits, level.num_candidates).expand(len(paths), -1)  # [P, K]
            else:
                served = served_probs(logits, context.draft_sampling).expand(len(paths), -1)  # [P, V]
                chosen, drawn_from = sample_candidates(served, level.num_candidates, context.generator)
                probs.append(drawn_from[level.parent, level.rank])  # [S, V]
            tokens.append(chosen[level.parent, level.rank])
            paths = torch.cat([paths[level.parent], tokens[-1][:, None].clamp(min=0)], dim=-1)
        drafted = torch.cat(tokens)
        return Proposal(drafted, torch.cat(probs) if probs else None, self.parents[: len(drafted)])

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        self.hidden = target_hidden
