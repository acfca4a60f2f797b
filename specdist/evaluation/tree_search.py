"""Owns finding the draft tree of at most N nodes that accepts most tokens, from the ranks of the evaluation texts.

The worth of a node is the number of block starts at which the text takes the node's path of ranks: the drafted tokens
that it adds. Over *given* starts the N worthiest paths are exactly the best tree of N nodes: a path is never taken more
often than its prefix, so they hold all their prefixes, and τ = 1 + Σ worth / starts. Which starts decoding visits
depends on the tree, though. So the search is a heuristic: the starts that the last tree visits are weighed anew while τ
of the replay rises, from several beginnings. What is sure: τ on the texts that are searched does not fall as N grows,
and is at least that of the chain of N tokens.

Shapes: B texts, L tokens of the longest, H heads, P different paths. Entry s of a text is the block that starts at s.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdist import metrics
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import replay_rows
from specdist.replay import tree_accept
from specdist.schema import DistillRow, PromptCounts
from specdist.tree import MAX_RANK, DraftTree


@dataclass(frozen=True)
class RankedTexts:
    """Texts of two tokens or more with the ranks [length, H] that heads give them (`HeadsScorer.ranks`)."""

    rows: Sequence[DistillRow]
    ranks: Sequence[Tensor]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each text: [B]."""
        return torch.tensor([len(row.completion_ids) for row in self.rows])

    @cached_property
    def padded(self) -> Tensor:
        """All ranks: [B, L, H]. Past a text's end no candidate is right."""
        return torch.nn.utils.rnn.pad_sequence(list(self.ranks), batch_first=True, padding_value=MAX_RANK)

    @cached_property
    def starts(self) -> Tensor:
        """Where a block can start: [B, L], bool."""
        places = torch.arange(self.padded.shape[1])
        return (places >= 1) & (places < self.lengths[:, None])

    @property
    def num_heads(self) -> int:
        return self.padded.shape[-1]

    @property
    def prompt_ids(self) -> list[str]:
        """The different prompts, sorted."""
        return sorted({row.prompt_id for row in self.rows})

    def of_prompts(self, prompt_ids: set[str]) -> "RankedTexts":
        """The texts that answer these prompts."""
        kept = [i for i, row in enumerate(self.rows) if row.prompt_id in prompt_ids]
        return RankedTexts([self.rows[i] for i in kept], [self.ranks[i] for i in kept])


def replay_tree(texts: RankedTexts, tree: DraftTree) -> list[PromptCounts]:
    """Counters of greedy decoding with `tree`, by prompt, in the order of prompts' ids; drafted tokens are levels."""
    accepts = tree_accept(texts.padded, tree)  # [B, L, depth]
    cut = [accept[:length] for accept, length in zip(accepts, texts.lengths.tolist(), strict=True)]
    by_prompt: dict[str, PromptCounts] = {}
    for counts in replay_rows(texts.rows, cut, tree.depth):
        known = by_prompt.get(counts.prompt_id)
        by_prompt[counts.prompt_id] = counts if known is None else metrics.add_counts(known, counts)
    return [by_prompt[prompt_id] for prompt_id in sorted(by_prompt)]


def visited_starts(texts: RankedTexts, tree: DraftTree) -> tuple[Tensor, float]:
    """The block starts of greedy decoding with `tree` [B, L], bool, and its τ: the walk of `replay.greedy_steps`."""
    accepted = tree_accept(texts.padded, tree).long().cumprod(dim=-1).sum(dim=-1)  # [B, L]
    visited = torch.zeros_like(texts.starts)
    text, start = torch.arange(len(accepted)), torch.ones(len(accepted), dtype=torch.long)
    while len(text):
        visited[text, start] = True
        start = start + accepted[text, start] + 1
        live = start < texts.lengths[text]
        text, start = text[live], start[live]
    return visited, metrics.mean_accepted_length(accepted[visited].sum().item(), visited.sum().item())


class PathCounts:
    """Every path of ranks that a text takes from some start, to be counted over any starts.

    Paths are numbered by depth, then in order: a prefix has a lower number than what goes on from it.
    """

    def __init__(self, texts: RankedTexts) -> None:
        flat = texts.padded.flatten(0, 1)  # [B · L, H]
        parent, alive = torch.zeros(len(flat), dtype=torch.long), torch.ones(len(flat), dtype=torch.bool)
        self.paths: list[tuple[int, ...]] = [()]
        numbers = []
        for rank in flat.unbind(dim=-1):
            alive = alive & (rank < MAX_RANK)
            known, which = torch.unique(parent[alive] * MAX_RANK + rank[alive], return_inverse=True)
            first = len(self.paths)
            self.paths += [(*self.paths[code // MAX_RANK], code % MAX_RANK) for code in known.tolist()]
            parent = parent.masked_scatter(alive, which + first)
            numbers.append(torch.where(alive, parent, 0))
        self.numbers = torch.stack(numbers, dim=-1)  # [B · L, H]; 0, the empty path, where it has ended

    def best_tree(self, starts: Tensor, num_nodes: int) -> DraftTree:
        """The tree of at most so many nodes that accepts most tokens at exactly these starts [B, L], bool.

        Of paths that are taken equally often the shorter, then the lower ranks; none that is never taken, except (0,).
        """
        worth = torch.bincount(self.numbers[starts.flatten()].flatten(), minlength=len(self.paths))[1:]  # [P]
        order = torch.sort(worth, descending=True, stable=True).indices[:num_nodes]
        paths = [self.paths[1 + i] for i in order.tolist() if worth[i] > 0]
        return DraftTree.of(paths or [(0,)], self.numbers.shape[-1])


def search_trees(texts: RankedTexts, sizes: Sequence[int]) -> dict[int, DraftTree]:
    """By size, the best tree of at most so many nodes that is found, of equally good ones that of fewest nodes.

    It is fitted to `texts`: for a τ that is not, see `cross_fitted`.
    """
    counts = PathCounts(texts)
    found: dict[int, DraftTree] = {}
    smaller: list[DraftTree] = []  # the tree of the size before
    for size in sorted(sizes):
        known = [DraftTree.chain(min(size, texts.num_heads)), *smaller]
        visits = [visited_starts(texts, tree) for tree in known]
        tried = [(tau, tree) for tree, (_, tau) in zip(known, visits, strict=True)]
        tried += [_climb(texts, counts, starts, size) for starts in (texts.starts, *(starts for starts, _ in visits))]
        _, found[size] = max(tried, key=lambda item: (item[0], -item[1].num_nodes))
        smaller = [found[size]]
    return found


def _climb(texts: RankedTexts, counts: PathCounts, starts: Tensor, size: int) -> tuple[float, DraftTree]:
    """Best trees of the starts that the last tree visits, from `starts` on, while τ rises: the highest τ, its tree."""
    best, highest = counts.best_tree(starts, size), 0.0
    tree = best
    while True:
        starts, tau = visited_starts(texts, tree)
        if tau <= highest:
            return highest, best
        highest, best = tau, tree
        tree = counts.best_tree(starts, size)


@dataclass(frozen=True)
class FittedTree:
    """A tree found on all texts, and counters by prompt of trees found in the same way on the other half of them."""

    tree: DraftTree
    counts: list[PromptCounts]


def halves(prompt_ids: Sequence[str]) -> tuple[set[str], set[str]]:
    """Two halves of different prompts, as their hashes fall. Raises ConfigError on fewer than two prompts."""
    if len(prompt_ids) < 2:
        raise ConfigError(
            f"{len(prompt_ids)} evaluation prompts whose answers can be drafted: a tree must be found on some and "
            "measured on others; evaluate on at least two"
        )
    mixed = sorted(prompt_ids, key=lambda prompt_id: hashlib.sha256(prompt_id.encode()).hexdigest())
    return set(mixed[::2]), set(mixed[1::2])


def cross_fitted(texts: RankedTexts, sizes: Sequence[int]) -> list[FittedTree]:
    """Trees of at most each of `sizes` nodes, smallest first; a size that needs no more nodes than others is left out.

    The counters are not flattered by the choice of the tree: each half of the prompts is replayed with the tree that
    was found on the other half. Raises ConfigError on fewer than two prompts.
    """
    one, other = (texts.of_prompts(half) for half in halves(texts.prompt_ids))
    on_one, on_other, on_all = (search_trees(part, sizes) for part in (one, other, texts))
    fitted: list[FittedTree] = []
    for size, tree in on_all.items():
        if fitted and tree == fitted[-1].tree:
            continue
        counts = [*replay_tree(one, on_other[size]), *replay_tree(other, on_one[size])]
        smaller = [known for known in fitted if known.tree.num_nodes < tree.num_nodes]
        fitted = [*smaller, FittedTree(tree, sorted(counts, key=lambda prompt: prompt.prompt_id))]
    return fitted
