"""Which prompts are taken: sides by hash, limits spread over domains, mixtures by weight; nothing by order."""

import random
from collections import Counter

import numpy as np
import pytest

from specdist.dataset.near_duplicates import Signatures
from specdist.dataset.selection import EVAL, TRAIN, Selection, mixture, sides_by_hash, spread
from specdist.errors import ArtifactError


def hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def test_sides_follow_the_hash_alone_and_a_larger_fraction_keeps_what_was_held_out() -> None:
    rows = hashes(20_000)
    sides = sides_by_hash(rows, 0.05)
    assert 0.04 < (sides == EVAL).mean() < 0.06
    order = np.random.default_rng(1).permutation(len(rows))
    assert (sides_by_hash(rows[order][:700], 0.05) == sides[order][:700]).all()
    assert set(rows[sides == EVAL]) < set(rows[sides_by_hash(rows, 0.1) == EVAL])


def test_sides_are_known_numbers() -> None:
    """Another salt or form of the hash would move prompts between training and evaluation."""
    held_out = sides_by_hash(np.arange(40, dtype=np.uint64), 0.25).nonzero()[0].tolist()
    assert held_out == [5, 9, 16, 17, 19, 22, 23, 27, 30, 31, 35]


def test_spread_takes_domains_in_turn_by_smallest_hash() -> None:
    rows, domains = hashes(300), np.repeat([0, 1, 2], [200, 90, 10])
    few, more = spread(rows, domains, 24), spread(rows, domains, 120)
    assert Counter(domains[few].tolist()) == {0: 8, 1: 8, 2: 8}
    assert Counter(domains[more].tolist()) == {0: 55, 1: 55, 2: 10}
    assert not (few & ~more).any()
    assert rows[few & (domains == 0)].max() == np.sort(rows[domains == 0])[7]
    assert spread(rows, domains, 1000).all()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, {0: 120, 1: 40}), (40, {0: 30, 1: 10}), (41, {0: 31, 1: 10}), (9999, {0: 120, 1: 40})],
)
def test_mixture_has_the_shares_of_the_weights(limit: int | None, expected: dict[int, int]) -> None:
    rows, sources = hashes(240), np.repeat([0, 1], [200, 40])
    chosen = mixture(rows, sources, [3, 1], limit)
    assert Counter(sources[chosen].tolist()) == expected
    assert rows[chosen & (sources == 0)].max() == np.sort(rows[sources == 0])[expected[0] - 1]


def test_mixture_does_not_depend_on_order() -> None:
    rows, sources = hashes(500), np.random.default_rng(1).integers(0, 3, 500)
    order = np.random.default_rng(2).permutation(500)
    assert (mixture(rows, sources, [1, 2, 5], 70)[order] == mixture(rows[order], sources[order], [1, 2, 5], 70)).all()


def test_mixture_with_an_empty_source_is_an_error() -> None:
    with pytest.raises(ArtifactError, match=r"sources with \[5, 0\] prompts"):
        mixture(hashes(5), np.zeros(5, np.int64), [1, 1], None)


def signatures(*texts: str) -> np.ndarray:
    found = Signatures()
    for text in texts:
        found.add([{"role": "user", "content": text}])
    return found.array()


def test_every_row_has_one_fate() -> None:
    rng = random.Random(0)
    long, other, third = (" ".join(f"w{rng.randrange(999)}" for _ in range(80)) for _ in range(3))
    texts = [long, long, long + " end", other, other + " end", third, other + " fin"]
    rows = np.array([5, 5, 4, 3, 2, 9, 1], np.uint64)
    selection = Selection(rows, np.array([TRAIN, TRAIN, TRAIN, EVAL, TRAIN, TRAIN, EVAL]))
    selection.drop_exact_duplicates()
    assert selection.drop_shared().tolist() == []
    selection.drop_near_duplicates(signatures(*texts), 0.8, keep_evaluation=True)
    assert selection.left_out(TRAIN) == {"exact_duplicate": 1, "near_duplicate": 1, "near_evaluation": 1}
    assert selection.kept(TRAIN).tolist() == [2, 5], "of near-duplicates the one with the smallest hash stays"
    assert (selection.kept(EVAL).tolist(), selection.left_out(EVAL)) == ([3, 6], {})
    selection.take(TRAIN, np.array([False, True]))
    assert selection.left_out(TRAIN)["not_chosen"] == 1


def test_held_out_prompts_lose_their_own_near_duplicates_too() -> None:
    texts = [" ".join(f"w{i}" for i in range(80)) + end for end in ("", " end", " fin")]
    selection = Selection(np.array([3, 2, 1], np.uint64), np.array([EVAL, EVAL, TRAIN]))
    selection.drop_near_duplicates(signatures(*texts), 0.8, keep_evaluation=False)
    assert selection.kept(EVAL).tolist() == [1]
    assert selection.left_out(TRAIN) == {"near_evaluation": 1}


def test_what_is_evaluated_on_is_dropped_from_training() -> None:
    selection = Selection(np.array([1, 2, 2, 1], np.uint64), np.array([TRAIN, TRAIN, EVAL, TRAIN]))
    selection.drop_exact_duplicates()
    assert selection.drop_shared().tolist() == [1]
    assert selection.left_out(TRAIN) == {"exact_duplicate": 1, "in_evaluation": 1}
