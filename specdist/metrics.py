"""Owns the acceptance mathematics on counters: ratios of sums, intervals and tests over prompts, the speed model.

Pure functions of plain numbers (numpy only), so that training, evaluation, report and gate mean the same by a word.
The unit of statistics is the prompt: tokens of one text are not independent, prompts are.
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from specdist.schema import AcceptanceResult, AcceptanceSummary, PromptCounts
from specdist.schema_quality import AnswerLikelihood

BOOTSTRAP_DRAWS = 10_000
_BLOCK = 1_000  # draws per matrix product: bounds memory at block × prompts of floats


def mean_accepted_length(num_accepted_tokens: float, num_drafts: float) -> float:
    """τ = 1 + accepted / drafts: tokens per target step, bonus token included (vLLM's "mean acceptance length").

    Raises ValueError where nothing was drafted: an empty measurement has no mean.
    """
    if not num_drafts > 0:
        raise ValueError(f"num_drafts {num_drafts}: a mean accepted length needs at least one verify step")
    return 1.0 + num_accepted_tokens / num_drafts


def independent_mean_accepted_length(acceptance_rate: float, num_speculative_tokens: int) -> float:
    """τ = (1 − α^(γ+1)) / (1 − α) for independent acceptances of rate α (Leviathan et al. 2023, eq. 1)."""
    if acceptance_rate == 1.0:
        return num_speculative_tokens + 1.0
    return (1.0 - acceptance_rate ** (num_speculative_tokens + 1)) / (1.0 - acceptance_rate)


def predicted_speedup(
    mean_accepted_length: float, num_speculative_tokens: int, draft_cost_ratio: float, verify_cost_ratio: float = 1.0
) -> float:
    """τ / (γc + v): c = cost of drafting one token, v = cost of verifying a block, both in target steps.

    Leviathan et al. 2023, theorem 3.8, with the verify step's measured cost in place of 1.
    """
    return mean_accepted_length / (num_speculative_tokens * draft_cost_ratio + verify_cost_ratio)


def break_even_acceptance_rate(
    num_speculative_tokens: int, draft_cost_ratio: float, verify_cost_ratio: float = 1.0
) -> float | None:
    """The rate α of independent acceptances at which the predicted speed-up is 1; None where even α = 1 gains nothing.

    Solves (1 − α^(γ+1)) / (1 − α) = γc + v by bisection: the left side, Σ α^i over i = 0 … γ, rises with α.
    """
    cost = num_speculative_tokens * draft_cost_ratio + verify_cost_ratio
    if cost > num_speculative_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if independent_mean_accepted_length(middle, num_speculative_tokens) < cost:
            low = middle
        else:
            high = middle
    return high


def add_counts(one: PromptCounts, other: PromptCounts) -> PromptCounts:
    """Counters of two texts of one prompt together: the turns of a conversation are one unit of statistics."""
    positions = zip(one.accepted_at_position, other.accepted_at_position, strict=True)
    return PromptCounts(
        one.prompt_id,
        one.domain,
        one.num_drafts + other.num_drafts,
        one.num_draft_tokens + other.num_draft_tokens,
        [a + b for a, b in positions],
        max((n for n in (one.num_prompt_tokens, other.num_prompt_tokens) if n is not None), default=None),
    )


def resampled_sums(values: np.ndarray, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> np.ndarray:
    """Sums of `values` [prompts, columns] over `draws` bootstrap resamplings of the prompts: [draws, columns].

    Equal numbers of prompts and equal seeds give equal resamplings, whatever the columns are.
    """
    weights = _resampling_weights(len(values), draws, seed)
    blocks = [weights[start : start + _BLOCK].astype(np.float64) @ values for start in range(0, draws, _BLOCK)]
    return np.concatenate(blocks)


@functools.lru_cache(maxsize=8)
def _resampling_weights(count: int, draws: int, seed: int) -> np.ndarray:
    """How often each of `count` prompts is in each draw: [draws, count]. Kept: a gate asks for the same ones often."""
    generator, blocks = np.random.default_rng(seed), []
    for start in range(0, draws, _BLOCK):
        drawn = generator.multinomial(count, np.full(count, 1.0 / count), size=min(_BLOCK, draws - start))
        blocks.append(drawn.astype(np.uint16))
    return np.concatenate(blocks)


def _counter_matrix(prompts: Sequence[PromptCounts]) -> np.ndarray:
    return np.array([[p.num_accepted_tokens, p.num_drafts] for p in prompts], dtype=np.float64)  # [prompts, 2]


def pooled_length(prompts: Sequence[PromptCounts]) -> float:
    """τ of the summed counters of `prompts`. Raises ValueError where nothing was drafted."""
    return mean_accepted_length(sum(p.num_accepted_tokens for p in prompts), sum(p.num_drafts for p in prompts))


def bootstrap_lengths(prompts: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> np.ndarray:
    """τ of each bootstrap resampling of `prompts`: [draws]."""
    sums = resampled_sums(_counter_matrix(prompts), draws, seed)
    return 1.0 + sums[:, 0] / sums[:, 1]


def _check_same_prompts(candidate: Sequence[PromptCounts], other: Sequence[PromptCounts]) -> None:
    if [p.prompt_id for p in candidate] != [p.prompt_id for p in other]:
        raise ValueError("a paired comparison needs the same prompts in the same order on both sides")


def _paired_sums(candidate: Sequence[PromptCounts], other: Sequence[PromptCounts], draws: int, seed: int) -> np.ndarray:
    _check_same_prompts(candidate, other)
    return resampled_sums(np.concatenate([_counter_matrix(candidate), _counter_matrix(other)], axis=1), draws, seed)


def bootstrap_length_ratios(
    candidate: Sequence[PromptCounts], other: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> np.ndarray:
    """τ(candidate) / τ(other) of paired resamplings: both sides get the same prompts each time. [draws]

    Raises ValueError unless both hold the same prompts in the same order.
    """
    sums = _paired_sums(candidate, other, draws, seed)
    return (1.0 + sums[:, 0] / sums[:, 1]) / (1.0 + sums[:, 2] / sums[:, 3])


def bootstrap_length_differences(
    candidate: Sequence[PromptCounts], other: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> np.ndarray:
    """τ(candidate) − τ(other) of paired resamplings, as `bootstrap_length_ratios`. [draws]"""
    sums = _paired_sums(candidate, other, draws, seed)
    return sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]


def bootstrap_gain_ratios(
    candidate: Sequence[PromptCounts], other: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> np.ndarray:
    """(τ(candidate) − 1) / (τ(other) − 1) of paired resamplings, as `bootstrap_length_ratios`. [draws]"""
    sums = _paired_sums(candidate, other, draws, seed)
    return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])


def bootstrap_rate_ratios(
    pairs: Sequence[Sequence[float]], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> np.ndarray:
    """Ratio of two rates of sums over resampled prompts: [draws].

    A row of `pairs` holds [tokens, seconds, other tokens, other seconds] of one prompt, all its repeats together.
    """
    sums = resampled_sums(np.array(pairs, dtype=np.float64), draws, seed)
    return sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])


def bootstrap_shares(counts: Sequence[Sequence[float]], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> np.ndarray:
    """Shares hits / all of summed counts over resampled prompts; a row of `counts` is [hits, more hits, …, all > 0].

    Returns [draws, kinds of hits].
    """
    sums = resampled_sums(np.array(counts, dtype=np.float64), draws, seed)
    return sums[:, :-1] / sums[:, -1:]


def swapped_sums(
    ours: np.ndarray, theirs: np.ndarray, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of both sides [prompts, columns] over `draws` relabellings, each of which swaps a prompt's two sides or not.

    Every prompt is swapped with probability 1/2, independently. Returns two arrays [draws, columns].
    """
    kept, difference = _kept_labels(len(ours), draws, seed), ours - theirs
    blocks = [kept[start : start + _BLOCK].astype(np.float64) @ difference for start in range(0, draws, _BLOCK)]
    first = theirs.sum(axis=0) + np.concatenate(blocks)
    return first, ours.sum(axis=0) + theirs.sum(axis=0) - first


@functools.lru_cache(maxsize=4)
def _kept_labels(count: int, draws: int, seed: int) -> np.ndarray:
    """Which of `count` prompts keep their labels (1) in each draw and which swap them (0): [draws, count]."""
    return np.random.default_rng(seed).integers(0, 2, size=(draws, count), dtype=np.uint8)


def permutation_p_value(
    candidate: Sequence[PromptCounts], other: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> float:
    """P(τ ratio at least the observed one) were both drafters alike: the share of relabellings that reach it.

    The null hypothesis is that the two sides of each prompt may be swapped; one-sided, and never 0, since the observed
    labels count as one of the draws (Phipson and Smyth 2010). Raises ValueError unless both hold the same prompts.
    """
    _check_same_prompts(candidate, other)
    first, second = swapped_sums(_counter_matrix(candidate), _counter_matrix(other), draws, seed)
    ratios = (1.0 + first[:, 0] / first[:, 1]) / (1.0 + second[:, 0] / second[:, 1])
    observed = pooled_length(candidate) / pooled_length(other)
    return float(1 + np.sum(ratios >= observed * (1.0 - 1e-12))) / (draws + 1)


def power(effect: float, standard_error: float, confidence: float = 0.95) -> float:
    """P(the interval's low end exceeds the bar) of an estimate that lies `effect` above it: Φ(effect / se − z)."""
    normal = NormalDist()
    return normal.cdf(effect / standard_error - normal.inv_cdf(0.5 + confidence / 2.0))


def prompts_to_decide(
    effect: float, standard_error: float, num_prompts: int, confidence: float = 0.95, wanted_power: float = 0.8
) -> int | None:
    """Prompts at which a true `effect`, its distance from the bar, is shown with `wanted_power`: inverse of `power`.

    `standard_error` is that at `num_prompts` and falls with their root. None where no number of prompts would do.
    """
    if effect == 0.0 or not math.isfinite(effect) or not math.isfinite(standard_error):
        return None
    normal = NormalDist()
    wanted = (normal.inv_cdf(0.5 + confidence / 2.0) + normal.inv_cdf(wanted_power)) * standard_error / abs(effect)
    return math.ceil(num_prompts * wanted**2)


def perplexity_ratio(answers: Sequence[AnswerLikelihood]) -> float:
    """exp of what the changed target loses in log-likelihood per token: its perplexity over the original's.

    Raises ValueError where there is no token.
    """
    if not (tokens := sum(a.num_tokens for a in answers)):
        raise ValueError("a perplexity needs at least one token")
    return float(np.exp(sum(a.original_logprob - a.changed_logprob for a in answers) / tokens))


def bootstrap_perplexity_ratios(
    answers: Sequence[AnswerLikelihood], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> np.ndarray:
    """`perplexity_ratio` of each bootstrap resampling of the prompts, the same on both sides. [draws]"""
    losses = [[a.original_logprob - a.changed_logprob, a.num_tokens] for a in answers]
    return np.exp(bootstrap_shares(losses, draws=draws, seed=seed)[:, 0])


def interval(samples: np.ndarray, confidence: float = 0.95) -> list[float]:
    """Percentile interval of bootstrap `samples`: [low, high]."""
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return [float(low), float(high)]


def summarize(prompts: Sequence[PromptCounts], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> AcceptanceSummary:
    """Sum the counters of `prompts` and form the ratios. Raises ValueError on no prompts or no drafts."""
    if not prompts:
        raise ValueError("no prompts to summarise")
    drafts = sum(p.num_drafts for p in prompts)
    drafted = sum(p.num_draft_tokens for p in prompts)
    accepted = sum(p.num_accepted_tokens for p in prompts)
    positions = range(max(len(p.accepted_at_position) for p in prompts))
    at_position = [sum(p.accepted_at_position[i] for p in prompts) for i in positions]
    return AcceptanceSummary(
        num_prompts=len(prompts),
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_accepted_length=mean_accepted_length(accepted, drafts),
        mean_accepted_length_interval=interval(bootstrap_lengths(prompts, draws=draws, seed=seed)),
        acceptance_at_position=[value / drafts for value in at_position],
    )


def by_context(prompts: Sequence[PromptCounts], *, draws: int = 2_000) -> dict[str, AcceptanceSummary]:
    """Summaries of prompts by their length, shortest first: "under 128", "128 to 255", … tokens, each twice as wide.

    Prompts whose length is not known are left out.
    """
    groups: dict[int, list[PromptCounts]] = {}
    for prompt in prompts:
        if prompt.num_prompt_tokens is not None:
            groups.setdefault(max(0, prompt.num_prompt_tokens.bit_length() - 7), []).append(prompt)
    names = {i: f"{64 << i} to {(128 << i) - 1}" if i else "under 128" for i in groups}
    return {names[i]: summarize(groups[i], draws=draws) for i in sorted(groups)}


def acceptance_result(
    prompts: Sequence[PromptCounts],
    *,
    setting: str,
    temperature: float,
    draft_sample_method: str,
    num_speculative_tokens: int,
    texts_sha256: str | None = None,
    draws: int = 2_000,
) -> AcceptanceResult:
    """Summaries in total and by domain of one setting's counters."""
    domains = sorted({p.domain for p in prompts})
    return AcceptanceResult(
        setting=setting,
        temperature=temperature,
        draft_sample_method=draft_sample_method,
        num_speculative_tokens=num_speculative_tokens,
        prompts=list(prompts),
        summary=summarize(prompts, draws=draws),
        domains={d: summarize([p for p in prompts if p.domain == d], draws=draws) for d in domains},
        texts_sha256=texts_sha256,
    )
