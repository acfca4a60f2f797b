"""Search of draft trees: against every tree there is, against the chain, and on texts that it has not seen."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdist.errors import ConfigError
from specdist.evaluation.tree_search import (
    PathCounts,
    RankedTexts,
    cross_fitted,
    halves,
    replay_tree,
    search_trees,
    visited_starts,
)
from specdist.metrics import pooled_length
from specdist.replay import greedy_steps, tree_accept
from specdist.schema import DistillRow, SamplingSpec
from specdist.tree import MAX_RANK, DraftTree

SEEDS = range(8)


def row(prompt: str, length: int, turn: int = 0) -> DistillRow:
    return DistillRow(f"{prompt}-{turn}", prompt, turn, 0, "d", [1], [1] * length, "length", SamplingSpec(), 0)


def random_texts(seed: int, *, texts: int = 12, heads: int = 2, highest: int = 3, text_length: int = 20) -> RankedTexts:
    """Ranks 0 to `highest`, where `highest` stands for no candidate; the text's end is the scorer's."""
    generator = torch.Generator().manual_seed(seed)
    rows, ranks = [], []
    for i in range(texts):
        length = int(torch.randint(2, text_length, (), generator=generator))
        own = torch.full((length, heads), MAX_RANK)
        for j in range(min(heads, length - 1)):
            drawn = torch.randint(0, highest + 1, (length - 1 - j,), generator=generator)
            own[1 : length - j, j] = torch.where(drawn == highest, MAX_RANK, drawn)
        rows.append(row(f"p{i:02d}", length))
        ranks.append(own)
    return RankedTexts(rows, ranks)


def all_trees(num_ranks: int, max_nodes: int) -> Iterator[DraftTree]:
    """Every tree of two heads: 3 + 9 paths and which of them can stand together."""
    paths = [p for depth in (1, 2) for p in itertools.product(range(num_ranks), repeat=depth)]
    for size in range(1, max_nodes + 1):
        for chosen in itertools.combinations(paths, size):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield DraftTree.of(chosen, 2)


def accepted_at(texts: RankedTexts, tree: DraftTree, starts: Tensor) -> int:
    return int(tree_accept(texts.padded, tree).cumprod(dim=-1).sum(dim=-1)[starts].sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_over_given_starts_no_tree_accepts_more(seed: int) -> None:
    texts = random_texts(seed)
    chosen = texts.starts & (torch.rand(texts.starts.shape, generator=torch.Generator().manual_seed(seed)) < 0.7)
    for starts, size in itertools.product((texts.starts, chosen), (1, 2, 3, 4)):
        found = PathCounts(texts).best_tree(starts, size)
        best = max(accepted_at(texts, tree, starts) for tree in all_trees(3, size))
        assert found.num_nodes <= size
        assert accepted_at(texts, found, starts) == best


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tree_found_is_near_the_best_of_all_and_grows_no_worse(seed: int) -> None:
    texts = random_texts(seed)
    sizes = (1, 2, 3, 4)
    found = [visited_starts(texts, tree)[1] for tree in search_trees(texts, sizes).values()]
    assert found == sorted(found)
    best = [max(visited_starts(texts, tree)[1] for tree in all_trees(3, size)) for size in sizes]
    for mine, highest in zip(found, best, strict=True):
        assert 0.9 * (highest - 1) <= mine - 1 <= highest - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_is_never_worse_than_the_chain_of_as_many_tokens(seed: int) -> None:
    texts = random_texts(seed, heads=4, highest=2)
    trees = search_trees(texts, (1, 2, 3, 4))
    assert list(trees) == [1, 2, 3, 4]
    for size, tree in trees.items():
        assert visited_starts(texts, tree)[1] >= visited_starts(texts, DraftTree.chain(size))[1]


def test_visited_starts_are_those_of_greedy_decoding() -> None:
    texts = random_texts(3, heads=3)
    tree = DraftTree.of([(0,), (1,), (0, 0), (0, 2), (0, 0, 1)], 3)
    visited, tau = visited_starts(texts, tree)
    for own, ranks, length in zip(visited, texts.ranks, texts.lengths.tolist(), strict=True):
        steps = greedy_steps(tree_accept(ranks, tree), length, tree.depth)
        assert own.nonzero()[:, 0].tolist() == [start for start, _, _ in steps]
    assert tau == pytest.approx(pooled_length(replay_tree(texts, tree)), abs=1e-12)


def test_turns_of_a_prompt_are_counted_together() -> None:
    first, second = random_texts(0, texts=1), random_texts(1, texts=1)
    length = len(second.rows[0].completion_ids)
    both = RankedTexts([*first.rows, row("p00", length, turn=1)], [*first.ranks, *second.ranks])
    (counts,) = replay_tree(both, DraftTree.chain(2))
    apart = [replay_tree(texts, DraftTree.chain(2))[0].num_drafts for texts in (first, second)]
    assert counts.num_drafts == sum(apart)


def test_where_no_candidate_is_ever_right_the_tree_is_one_token() -> None:
    texts = RankedTexts([row("a", 6)], [torch.full((6, 3), MAX_RANK)])
    assert {tree.paths for tree in search_trees(texts, (1, 8)).values()} == {((0,),)}


def test_a_tree_holds_no_path_that_is_never_taken() -> None:
    texts = RankedTexts([row("a", 6)], [torch.tensor([[MAX_RANK, MAX_RANK], *[[7, 9]] * 4, [7, MAX_RANK]])])
    assert search_trees(texts, (64,))[64].paths == ((7,), (7, 9))


def test_halves_are_disjoint_even_and_do_not_depend_on_order() -> None:
    ids = [f"prompt {i}" for i in range(41)]
    one, other = halves(ids)
    assert not one & other
    assert one | other == set(ids)
    assert len(one) - len(other) == 1
    assert halves(ids[::-1]) == (one, other)
    with pytest.raises(ConfigError, match="1 evaluation prompts"):
        halves(["alone"])


def test_each_half_is_counted_with_the_tree_of_the_other() -> None:
    texts, sizes = random_texts(2, texts=30, heads=3), (1, 4, 8)
    one, other = (texts.of_prompts(half) for half in halves(texts.prompt_ids))
    on_one, on_other, on_all = (search_trees(part, sizes) for part in (one, other, texts))
    for fitted, size in zip(cross_fitted(texts, sizes), sizes, strict=True):
        expected = [*replay_tree(one, on_other[size]), *replay_tree(other, on_one[size])]
        assert fitted.tree == on_all[size]
        assert fitted.counts == sorted(expected, key=lambda counts: counts.prompt_id)


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_told_apart_by_their_nodes(seed: int) -> None:
    texts = random_texts(seed, texts=6, heads=3, text_length=8)
    trees = [fitted.tree for fitted in cross_fitted(texts, (1, 2, 4, 8, 16, 32, 64))]
    assert [tree.num_nodes for tree in trees] == sorted({tree.num_nodes for tree in trees})
    taus = [visited_starts(texts, tree)[1] for tree in trees]
    assert taus == sorted(taus)


def test_the_reported_length_is_not_flattered_by_the_choice() -> None:
    """Ranks without any habit: what a tree seems to have learnt of one half is not there in the other."""
    texts = random_texts(0, texts=30, heads=2, highest=10, text_length=16)
    (fitted,) = cross_fitted(texts, (8,))
    by_chance = visited_starts(texts, DraftTree.of([(i,) for i in range(8)], 2))[1]
    assert pooled_length(replay_tree(texts, fitted.tree)) > by_chance > pooled_length(fitted.counts)
