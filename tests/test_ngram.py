"""Lookup of n-grams: what is proposed, that the output stays the target's own, and that replay predicts every step."""

import pytest
import torch
from test_decoding import EOS, eval_set, prompts, target_model

from specdist.decoding.loop import decode
from specdist.drafters.ngram import NgramDrafter
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import NgramScorer, replay_counts
from specdist.evaluation.certify import certify_greedy, certify_sampled
from specdist.replay import greedy_steps, replay
from specdist.schema import SamplingSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),
        ([5, 2, 3, 7, 7, 1, 2, 3, 9, 9, 5, 2, 3], [7, 7, 1]),  # the longest suffix, not the last 2-gram
        ([2, 3, 4, 4, 2, 3, 5, 5, 2, 3], [5, 5, 2]),  # of equally long ones the last
        ([1, 2, 3, 4], []),
        ([7, 7, 7], [7, 7, 7]),  # it reaches the end: the text repeats
        ([4, 5, 6, 5, 6], [5, 6, 5]),
        ([3], []),
    ],
)
def test_what_followed_the_longest_known_suffix_is_proposed(text: list[int], expected: list[int]) -> None:
    assert NgramDrafter(max_ngram=3, min_ngram=2).lookup(text, 3) == expected
    growing = NgramDrafter(max_ngram=3, min_ngram=2)
    assert [growing.lookup(text[: i + 1], 3) for i in range(len(text))][-1] == expected


def test_n_grams_out_of_order_are_refused() -> None:
    for sizes in ((2, 3), (2, 0)):
        with pytest.raises(ConfigError, match="expected 1 ≤ min_ngram"):
            NgramDrafter(*sizes)


@pytest.mark.parametrize("gamma", [1, 4])
def test_e5_e8_lookup_is_greedy_identical_and_replay_counts_what_was_proposed(gamma: int) -> None:
    """Where nothing is found nothing is drafted, and nothing is counted as drafted."""
    target, sampling, texts = target_model(), SamplingSpec(max_new_tokens=40), prompts(10)
    drafter = NgramDrafter(max_ngram=3, min_ngram=1)
    plain = [decode(target, p, sampling, EOS) for p in texts]
    fast = [decode(target, p, sampling, EOS, drafter=drafter, num_speculative_tokens=gamma) for p in texts]
    assert [r.completion_ids for r in fast] == [r.completion_ids for r in plain]
    scorer, own = NgramScorer(NgramDrafter(max_ngram=3, min_ngram=1)), eval_set(target, sampling, plain, texts)
    for text, result in zip(own.texts, fast, strict=True):
        length = len(text.row.completion_ids)
        accept = scorer.accept(text, sampling)["greedy"]
        assert result.steps_in_text() == greedy_steps(accept, length, gamma)
    counted = [r.counts(f"p{i:03d}", "chat", gamma) for i, r in enumerate(fast) if len(r.completion_ids) > 1]
    assert replay_counts(scorer, own, [gamma])["greedy", gamma] == counted
    assert sum(c.num_accepted_tokens for c in counted) > 10
    drafted = {n for r in fast for n in r.draft_lengths()}
    assert {0, gamma} <= drafted, "the test must see steps without a match"


def test_lookup_is_certified_greedy_and_sampled() -> None:
    target, texts = target_model(), prompts(6)
    drafter = NgramDrafter(min_ngram=1)
    for temperature in (0.0, 0.8):
        sampling = SamplingSpec(temperature, max_new_tokens=30)
        own = [
            decode(target, p, sampling, EOS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(texts)
        ]
        given = (target, drafter, NgramScorer(drafter), eval_set(target, sampling, own, texts), 3, EOS)
        certification = certify_greedy(*given)[0] if sampling.is_greedy else certify_sampled(*given, "greedy")
        assert certification.passed
        assert certification.decoder_mean_accepted_length > 1.02


def test_replay_counts_no_draft_where_there_was_none() -> None:
    accept = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.5, -1.0], [-1.0, -1.0], [0.5, 0.5]])
    drafts, drafted, accepted = replay(accept[None], torch.tensor([5]), 2)
    # block at 1: 2 drafted and accepted, next at 4; there one token is left, drafted and accepted by half
    assert (drafts.item(), drafted.item(), accepted[0].tolist()) == (2.0, 3.0, [1.5, 1.0])
    drafts, drafted, accepted = replay(accept[None, 1:], torch.tensor([4]), 2)
    # at 1 of what is left: one drafted; accepted by half goes on at 3, rejected at 2, where nothing is drafted, then 3
    assert (drafts.item(), drafted.item(), accepted[0].tolist()) == (2.5, 2.0, [1.0, 0.0])
