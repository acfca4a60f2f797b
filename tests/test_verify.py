"""The acceptance rules: lossless in distribution, no 0/0, and the served distribution as transformers warps it."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdist.errors import ConfigError
from specdist.schema import SamplingSpec
from specdist.verify import (
    greedy_match,
    rejection_sample,
    residual_distribution,
    sample,
    served_logprobs,
    tree_match,
    tree_sample,
)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.8, 0, 1.0), (1.3, 5, 1.0), (0.7, 0, 0.6), (1.0, 7, 0.8)]
)
def test_served_logprobs_equal_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    served = served_logprobs(logits, SamplingSpec(temperature, top_k, top_p))
    torch.testing.assert_close(served, expected.log_softmax(-1))


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_top_p_equals_a_sort_of_the_whole_vocabulary(scale: float) -> None:
    """From flat, where the nucleus is most of the vocabulary, to peaked; scores are coarse, so many are equal."""
    logits = (torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * scale).bfloat16().float()
    for top_p in (0.05, 0.5, 0.9, 0.99):
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().softmax(-1)
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < top_p)
        served = served_logprobs(logits, SamplingSpec(1.0, top_p=top_p))
        differ = (served.isfinite() != kept).sum(-1)
        assert differ.max() <= 1  # the token at which rounding decides
        assert torch.equal(served[differ == 0], logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[differ == 0])


def test_served_logprobs_refuse_temperature_zero() -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        served_logprobs(torch.zeros(3), SamplingSpec(0.0))


def test_sample_never_draws_a_token_of_probability_zero() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).expand(20_000, 5)
    drawn = sample(probs, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {1, 3}
    assert abs((drawn == 1).float().mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], (3, 8)),
        ([5, 6, 7], [4, 6, 7, 8], (0, 4)),
        ([5, 9, 7], [5, 6, 7, 8], (1, 6)),
        ([], [3], (0, 3)),
    ],
)
def test_greedy_match(draft: list[int], target: list[int], expected: tuple[int, int]) -> None:
    assert greedy_match(torch.tensor(draft, dtype=torch.long), torch.tensor(target)) == expected


def test_residual_of_equal_distributions_is_no_zero_by_zero() -> None:
    probs = torch.tensor([0.25, 0.75])
    assert torch.equal(residual_distribution(probs, probs), probs)


@pytest.mark.parametrize("one_hot", [False, True])
def test_rejection_sampling_is_lossless(one_hot: bool) -> None:
    """The first emitted token is distributed as the target's, whatever the draft: chi-square at p ≈ 0.001."""
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    draft = torch.tensor([[0.1, 0.1, 0.4, 0.4]])
    generator = torch.Generator().manual_seed(1)
    counts, draws = torch.zeros(4), 20_000
    for _ in range(draws):
        token = torch.tensor([2]) if one_hot else sample(draft, generator)
        accepted, following = rejection_sample(token, None if one_hot else draft, target, generator)
        counts[int(token) if accepted else following] += 1
    expected = target[0] * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.27  # 3 degrees of freedom


def test_draft_equal_to_target_is_always_accepted() -> None:
    probs = torch.full((4, 8), 1 / 8)
    drafts = torch.tensor([1, 5, 7])
    assert rejection_sample(drafts, probs[:3], probs, torch.Generator().manual_seed(0))[0] == 3


# Of the newest token the children 5 and 6; of 5 again 6, and below that 7; of 6 the child 5
TREE_IDS, TREE_PARENTS = torch.tensor([5, 6, 6, 5, 7]), torch.tensor([-1, -1, 0, 1, 2])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([5, 6, 0, 7, 0, 9], ([0, 2, 4], 9)),
        ([6, 0, 5, 0, 8, 0], ([1, 3], 8)),
        ([5, 7, 0, 0, 0, 0], ([0], 7)),
        ([7, 6, 6, 6, 6, 6], ([], 7)),
    ],
)
def test_tree_match(target: list[int], expected: tuple[list[int], int]) -> None:
    assert tree_match(TREE_IDS, TREE_PARENTS, torch.tensor(target)) == expected


def test_tree_match_of_a_chain_is_greedy_match() -> None:
    draft, chain = torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 1])
    for target in ([5, 6, 7, 8], [4, 6, 7, 8], [5, 6, 9, 8]):
        accepted, following = tree_match(draft, chain, torch.tensor(target))
        assert (len(accepted), following) == greedy_match(draft, torch.tensor(target))


def test_tree_sampling_is_lossless() -> None:
    """The first two emitted tokens are distributed as the target's: chi-square at p ≈ 0.001, by each first token."""
    ids, parents = torch.tensor([2, 0, 1, 3]), torch.tensor([-1, -1, 0, 0])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    probs, generator, draws = (logits / 0.7).softmax(-1), torch.Generator().manual_seed(1), 6000
    counts, firsts = torch.zeros(2, 4), torch.zeros(4)
    for _ in range(draws):
        path, following = tree_sample(ids, parents, logits, SamplingSpec(0.7), generator)
        emitted = [*ids[path].tolist(), following]
        firsts[emitted[0]] += 1
        if path:
            counts[path[0], emitted[1]] += 1  # node 0 or node 1 was the first
    assert float(((firsts - probs[0] * draws) ** 2 / (probs[0] * draws)).sum()) < 16.27  # 3 degrees of freedom
    for node in range(2):
        expected = probs[node + 1] * counts[node].sum()
        assert expected.min() > 5
        assert float(((counts[node] - expected) ** 2 / expected).sum()) < 16.27
