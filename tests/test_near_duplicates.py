"""Near-duplicates: what makes shingles, how well signatures estimate, which row of a group stays."""

import random

import numpy as np
import pytest

from specdist.dataset.near_duplicates import SLOTS, Signatures, check_threshold, repeats, shingles
from specdist.errors import ConfigError


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def text(rng: random.Random, size: int = 60) -> list[str]:
    return [f"w{rng.randrange(5000)}" for _ in range(size)]


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    words = list(words)
    for place in rng.sample(range(len(words)), edits):
        words[place] = f"x{rng.randrange(5000)}"
    return words


def signed(*texts: list[str]) -> np.ndarray:
    signatures = Signatures()
    for words in texts:
        signatures.add(user(" ".join(words)))
    return signatures.array()


def jaccard(a: list[str], b: list[str]) -> float:
    one, two = (set(shingles(user(" ".join(words)))) for words in (a, b))
    return len(one & two) / len(one | two)


def test_shingles_are_runs_of_words_and_signs() -> None:
    assert shingles(user("What  is 2 + 3?")) == ["what is 2 + 3", "is 2 + 3 ?"]
    assert shingles(user("What is 2 - 3?")) == ["what is 2 - 3", "is 2 - 3 ?"]
    assert shingles(user("Straße")) == ["strasse"]
    assert shingles(user("👍")) == ["👍"]


def test_scripts_without_spaces_are_cut_into_characters() -> None:
    assert shingles(user("今日は天気がいい")) == [
        "今 日 は 天 気",
        "日 は 天 気 が",
        "は 天 気 が い",
        "天 気 が い い",
    ]
    assert len(shingles(user("สวัสดีครับ"))) > 1
    assert shingles(user("日本 and 中国 OK")) == ["日 本 and 中 国", "本 and 中 国 ok"]


def test_prompts_under_other_system_turns_share_nothing() -> None:
    def shared(one: str, two: str) -> bool:
        rows = [[{"role": "system", "content": s}, *user("Who are you, and what can you do?")] for s in (one, two)]
        return bool(set(shingles(rows[0])) & set(shingles(rows[1])))

    assert shared("You are a pirate.", "You are a pirate.")
    assert not shared("You are a pirate.", "You are a lawyer.")
    long = {"role": "system", "content": " ".join(text(random.Random(0), 200))}
    assert not set(shingles([long, *user("Sum up this text for me")])) & set(
        shingles([long, *user("Sing a song now ok")])
    )


def test_signatures_find_pairs_above_the_threshold_and_no_others() -> None:
    rng = random.Random(1)
    originals = [text(rng) for _ in range(600)]
    copies = [edited(rng, words, rng.randint(0, 3)) for words in originals]
    similarity = np.array([jaccard(a, b) for a, b in zip(originals, copies, strict=True)])
    signatures = signed(*originals, *copies)
    assert signatures.shape == (1200, SLOTS)
    found = repeats(signatures, np.arange(1200), 0.8)
    assert (found[:600] == -1).all()
    assert set(np.flatnonzero(found[600:] >= 0) - found[600:][found[600:] >= 0]) == {0}
    dropped = found[600:] >= 0
    assert (similarity > 0.9).sum() > 100
    assert dropped[similarity > 0.9].mean() > 0.99
    assert (similarity < 0.7).sum() > 100
    assert dropped[similarity < 0.7].mean() < 0.02


def test_the_first_in_rank_stays_whatever_the_order_of_rows() -> None:
    rng = random.Random(2)
    words = text(rng, 200)
    signatures = signed(*(edited(rng, words, 1) for _ in range(5)), text(rng))
    for ranked in ([3, 0, 1, 2, 4, 5], [5, 4, 2, 0, 1, 3]):
        found = repeats(signatures, np.array(ranked), 0.8)
        first = next(row for row in ranked if row != 5)
        assert {row: kept for row, kept in zip(ranked, found.tolist(), strict=True) if row != 5} == {
            row: -1 if row == first else first for row in range(5)
        }
        assert found[ranked.index(5)] == -1


def test_exempt_rows_stay_and_still_drop_others() -> None:
    words = text(random.Random(3))
    signatures = signed(words, words, words, text(random.Random(4)))
    assert repeats(signatures, np.array([0, 1, 2, 3]), 0.8, num_exempt=2).tolist() == [-1, -1, 0, -1]


def test_one_template_with_many_fillings_is_compared_within_its_groups() -> None:
    """Rows of one long template meet in most bands: each pair of equal fillings is found, others are kept."""
    rng = random.Random(5)
    template, fillings = text(rng, 40), [text(rng, 40) for _ in range(20)]
    signatures = signed(*(template + filling for filling in fillings for _ in range(2)))
    found = repeats(signatures, np.arange(40), 0.8)
    assert found.tolist() == [row - 1 if row % 2 else -1 for row in range(40)]


@pytest.mark.parametrize("threshold", [-0.1, 0.2, 1.1])
def test_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"expected 0\.5 to 1, or 0 for off"):
        check_threshold(threshold)
    check_threshold(0)
    check_threshold(1.0)
