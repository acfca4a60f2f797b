"""Draft trees: what is refused, their shape, and who stands where among equal candidates."""

import pytest
import torch

from specdist.errors import ConfigError
from specdist.replay import tree_accept
from specdist.tree import MAX_RANK, DraftTree, block_attention, candidates, ranks

PATHS = [[1], [0, 2], [0], [0, 0], [0, 0, 1]]


def test_nodes_are_sorted_by_depth_and_know_their_parents() -> None:
    tree = DraftTree.of(PATHS, 3)
    assert tree.paths == ((0,), (1,), (0, 0), (0, 2), (0, 0, 1))
    assert tree.parents == (-1, -1, 0, 0, 2)
    assert (tree.depth, tree.level_sizes, tree.num_nodes) == (3, (2, 2, 1), 5)
    assert DraftTree.chain(3) == DraftTree.of([[0, 0, 0], [0], [0, 0]], 3)


def test_e12_a_tree_for_more_heads_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[0, 0, 1\]: 3 levels, but there are 2 heads"):
        DraftTree.of(PATHS, 2)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [MAX_RANK]], r"\[10\]: rank 10, expected 0 to 9"),
        ([[0], [-1]], r"\[-1\]: rank -1"),
        ([[0], [1, 0]], r"\[1, 0\]: its prefix \[1\] is missing"),
        ([[0], [0]], r"\[0\] stands there twice"),
        ([4, 2, 1], "tree path 4: expected a list of ranks"),
        ([[0], [0, 0.5]], r"\[0, 0.5\]: expected a list of ranks"),
        ([], "without paths"),
        ([[], [0]], "an empty one"),
    ],
    ids=[
        "rank beyond the top-k",
        "negative rank",
        "no prefix",
        "twice",
        "counts per head",
        "no whole number",
        "empty",
        "empty path",
    ],
)
def test_e13_paths_that_make_no_tree_are_refused_by_name(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftTree.of(paths, 4)


def test_each_node_sees_itself_and_those_above_it() -> None:
    visible = block_attention(torch.tensor(DraftTree.of(PATHS, 3).parents))
    assert visible.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_ranks_are_places_among_the_candidates_also_where_logits_are_equal() -> None:
    logits = torch.randint(0, 4, (50, 12), generator=torch.Generator().manual_seed(0)).float()
    best = candidates(logits, MAX_RANK)
    assert torch.equal(best[:, 0], logits.argmax(dim=-1))
    for place in range(MAX_RANK):
        assert (ranks(logits, best[:, place]) == place).all()
    left = torch.tensor([next(t for t in range(12) if t not in row) for row in best.tolist()])
    assert (ranks(logits, left) == MAX_RANK).all()


def test_a_level_is_accepted_where_the_ranks_down_to_it_are_a_node() -> None:
    tree = DraftTree.of(PATHS, 3)
    found = torch.tensor([[0, 0, 1], [0, 2, 0], [1, 0, 0], [2, 0, 0], [0, MAX_RANK, 1], [0, 0, MAX_RANK]])
    assert tree_accept(found, tree).tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]]
