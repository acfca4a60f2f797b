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
