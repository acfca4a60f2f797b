"""Owns draft trees: which ranks of which heads are verified together, as nodes with parents.

Shapes: N nodes, B rows, V vocabulary, K candidates. A node is a path of ranks: (0, 2) is the third best token of head 1
after the best of head 0. Nodes are sorted by depth, then by path, so that parents come before their children; the root
(the newest token of the text) is no node and has the number −1. A chain is the tree of (0,), (0, 0), (0, 0, 0), …
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specdist.errors import ConfigError

MAX_RANK = 10  # candidates of a head that are ever looked at: what the original implementation keeps


@dataclass(frozen=True)
class DraftTree:
    """A tree by its paths, checked when it is made: `DraftTree.of`. They are Medusa's `medusa_choices`."""

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], num_heads: int) -> "DraftTree":
        """The tree of `paths` in any order, for so many heads.

        Raises ConfigError on no path at all, what is no list of whole numbers, more levels than heads, a rank that is
        not 0 to MAX_RANK − 1, a path that stands there twice, and a path without its prefix.
        """
        for path in paths:
            if not isinstance(path, Sequence) or not all(isinstance(rank, int) for rank in path):
                raise ConfigError(
                    f"tree path {path!r}: expected a list of ranks, one for each level, such as [0, 2]; numbers of "
                    "candidates per head are no tree"
                )
        nodes = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        if not nodes or not nodes[0]:
            raise ConfigError("a draft tree without paths, or with an empty one: expected paths like [0], [0, 0], [1]")
        for path, following in zip(nodes, [*nodes[1:], ()], strict=True):
            if len(path) > num_heads:
                raise ConfigError(f"tree path {list(path)}: {len(path)} levels, but there are {num_heads} heads")
            if bad := [rank for rank in path if not 0 <= rank < MAX_RANK]:
                raise ConfigError(f"tree path {list(path)}: rank {bad[0]}, expected 0 to {MAX_RANK - 1}")
            if path == following:
                raise ConfigError(f"tree path {list(path)} stands there twice: leave one out")
        known = set(nodes)
        for path in nodes:
            if len(path) > 1 and path[:-1] not in known:
                raise ConfigError(f"tree path {list(path)}: its prefix {list(path[:-1])} is missing; add it")
        return cls(tuple(nodes))

    @classmethod
    def chain(cls, length: int) -> "DraftTree":
        """The best token of each of `length` heads."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels below the root: the most tokens that a step can accept."""
        return len(self.paths[-1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Number of each node's parent, −1 for the root's children."""
        number = {path: i for i, path in enumerate(self.paths)}
        return tuple(number.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes at each depth, from 1 on: nodes of a level lie together."""
        return tuple(sum(len(path) == depth for path in self.paths) for depth in range(1, self.depth + 1))


def candidates(logits: Tensor, count: int) -> Tensor:
    """The `count` best tokens of each row, best first, of equal ones the lowest ids first: [B, V] → [B, K].

    `torch.topk` leaves the order of equal logits open; in half precision many are equal.
    """
    left, best = logits.clone(), []
    for _ in range(count):
        best.append(left.argmax(dim=-1, keepdim=True))
        left.scatter_(-1, best[-1], -torch.inf)
    return torch.cat(best, dim=-1)


def ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Place of `token_ids` [B] among the `candidates` of their rows of `logits` [B, V], at most MAX_RANK: [B]."""
    own = logits.gather(-1, token_ids[:, None])  # [B, 1]
    lower = torch.arange(logits.shape[-1], device=logits.device) < token_ids[:, None]
    ahead = (logits > own) | ((logits == own) & lower)
    return ahead.sum(dim=-1).clamp(max=MAX_RANK)


def block_attention(parents: Tensor) -> Tensor:
    """Which tokens of a block see which, for the newest token and N nodes after it: [N] → [N + 1, N + 1], bool.

    Each sees itself and those above it (SpecInfer's topology-aware mask, Miao et al. 2024, section 4). `parents`: −1
    stands for the newest token. The sum of a row less one is the depth. On the CPU, and made once for each tree: not to
    be written to.
    """
    return _block_attention(tuple(parents.tolist()))


@lru_cache(maxsize=64)
def _block_attention(parents: tuple[int, ...]) -> Tensor:
    visible = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents):  # parents stand before their children
        visible[node + 1] |= visible[parent + 1]
    return visible


@lru_cache(maxsize=64)
def children(parents: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Numbers of the children of the newest token and of each node, in order, −1 where it has fewer: [N + 1, most].

    Also the most that one of a level has, from the newest token's on. Made once for each tree: not to be written to.
    """
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        below[parent + 1].append(node)
    most, level = [], [0]
    while any(below[place] for place in level):
        most.append(max(len(below[place]) for place in level))
        level = [node + 1 for place in level for node in below[place]]
    widest = max(most, default=0)
    return torch.tensor([nodes + [-1] * (widest - len(nodes)) for nodes in below]), tuple(most)
