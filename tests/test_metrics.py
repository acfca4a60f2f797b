"""Ratios are formed from sums, intervals over prompts, and the speed model is the papers'."""

import numpy as np
import pytest

from specdist import metrics
from specdist.schema import PromptCounts


def counts(prompt: str, domain: str, drafts: float, drafted: float, *accepted: float) -> PromptCounts:
    return PromptCounts(prompt, domain, drafts, drafted, list(accepted))


def test_e18_ratios_are_token_weighted_and_domains_are_separate() -> None:
    prompts = [counts(f"a{i}", "a", 30, 100, 90) for i in range(10)]
    prompts += [counts(f"b{i}", "b", 9, 10, 1) for i in range(10)]
    result = metrics.acceptance_result(
        prompts, setting="greedy", temperature=0.0, draft_sample_method="greedy", num_speculative_tokens=1
    )
    assert result.summary.acceptance_rate == pytest.approx(910 / 1100)
    assert result.domains["a"].acceptance_rate == pytest.approx(0.9)
    assert result.domains["b"].acceptance_rate == pytest.approx(0.1)
    assert result.summary.mean_accepted_length == pytest.approx(1 + 910 / 390)


def test_e16_independent_length() -> None:
    assert metrics.independent_mean_accepted_length(0.8, 4) == pytest.approx(3.3616)
    assert metrics.independent_mean_accepted_length(1.0, 4) == 5.0


def test_predicted_speedup_of_a_free_and_of_a_costly_drafter() -> None:
    assert metrics.predicted_speedup(3.0, 4, 0.0) == 3.0
    assert metrics.predicted_speedup(3.0, 4, 0.5) == pytest.approx(1.0)
    assert metrics.predicted_speedup(3.0, 4, 0.5, verify_cost_ratio=2.0) == pytest.approx(0.75)


@pytest.mark.parametrize(("gamma", "cost", "verify"), [(1, 0.25, 1.0), (4, 0.2, 1.3), (10, 0.05, 1.0), (3, 0.0, 1.5)])
def test_at_the_break_even_rate_nothing_is_gained_and_above_it_something(
    gamma: int, cost: float, verify: float
) -> None:
    rate = metrics.break_even_acceptance_rate(gamma, cost, verify)
    at, above = (metrics.independent_mean_accepted_length(r, gamma) for r in (rate, rate + 0.01))
    assert metrics.predicted_speedup(at, gamma, cost, verify) == pytest.approx(1.0, abs=1e-9)
    assert metrics.predicted_speedup(above, gamma, cost, verify) > 1.0


def test_break_even_of_a_draft_as_slow_as_its_target_and_of_a_free_one() -> None:
    assert metrics.break_even_acceptance_rate(1, 0.25) == pytest.approx(0.25)  # 1 + α = 1 + c
    assert metrics.break_even_acceptance_rate(3, 1.0) == pytest.approx(1.0)
    assert metrics.break_even_acceptance_rate(3, 1.01) is None
    assert metrics.break_even_acceptance_rate(3, 0.0) == pytest.approx(0.0, abs=1e-9)


def test_interval_of_the_bootstrap_covers_the_mean_and_shrinks_with_prompts() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for size in (50, 800):
        prompts = [counts(str(i), "d", 20, 80, float(generator.integers(0, 20))) for i in range(size)]
        low, high = metrics.summarize(prompts).mean_accepted_length_interval
        assert low < metrics.pooled_length(prompts) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def test_paired_ratio_of_a_drafter_to_itself_is_exactly_one() -> None:
    prompts = [counts(str(i), "d", 20, 80, float(i % 7)) for i in range(30)]
    assert np.array_equal(metrics.bootstrap_length_ratios(prompts, prompts), np.ones(metrics.BOOTSTRAP_DRAWS))


def test_paired_comparison_refuses_other_prompts() -> None:
    ours, theirs = [counts("a", "d", 1, 1, 1)], [counts("b", "d", 1, 1, 1)]
    with pytest.raises(ValueError, match="same prompts"):
        metrics.bootstrap_length_ratios(ours, theirs)


def test_no_draft_has_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one verify step"):
        metrics.mean_accepted_length(0, 0)
    with pytest.raises(ValueError, match="no prompts"):
        metrics.summarize([])


def random_pair(generator: np.random.Generator, num_prompts: int) -> list[list[PromptCounts]]:
    def side() -> list[PromptCounts]:
        drafts = generator.integers(20, 60, num_prompts)
        return [counts(str(i), "a", d, d, generator.binomial(d, 0.5)) for i, d in enumerate(map(float, drafts))]

    return [side(), side()]


def test_the_permutation_p_value_is_that_of_all_relabellings() -> None:
    ours, theirs = random_pair(np.random.default_rng(4), 8)
    observed = metrics.pooled_length(ours) / metrics.pooled_length(theirs)
    ratios = []
    for mask in range(2**8):
        swapped = [(b, a) if mask >> i & 1 else (a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        first, second = zip(*swapped, strict=True)
        ratios.append(metrics.pooled_length(first) / metrics.pooled_length(second))
    exact = np.mean(np.array(ratios) >= observed * (1 - 1e-12))
    assert metrics.permutation_p_value(ours, theirs) == pytest.approx(exact, abs=0.02)
    assert metrics.permutation_p_value(theirs, ours) == pytest.approx(1 - exact, abs=0.02)


def test_the_permutation_p_value_is_uniform_without_a_difference() -> None:
    generator = np.random.default_rng(0)
    p_values = [metrics.permutation_p_value(*random_pair(generator, 40), draws=200) for _ in range(300)]
    assert np.mean(np.array(p_values) <= 0.1) == pytest.approx(0.1, abs=0.05)
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.05)


def test_a_permutation_needs_the_same_prompts() -> None:
    ours, theirs = random_pair(np.random.default_rng(4), 8)
    with pytest.raises(ValueError, match="same prompts"):
        metrics.permutation_p_value(ours, theirs[::-1])


def test_the_number_of_prompts_is_the_inverse_of_power() -> None:
    assert metrics.power(0.02, 0.02 / 1.959964) == pytest.approx(0.5)
    needed = metrics.prompts_to_decide(0.01, 0.02, 100)
    assert needed is not None
    assert metrics.power(0.01, 0.02 * (100 / needed) ** 0.5) == pytest.approx(0.8, abs=1e-3)
    assert metrics.prompts_to_decide(-0.01, 0.02, 100) == needed
    assert metrics.prompts_to_decide(0.0, 0.02, 100) is None
    assert metrics.prompts_to_decide(0.01, np.inf, 100) is None
