"""Owns what the gate concludes from counts: intervals and tests over prompts, domain by domain, speed, rules of thumb.

Intervals are bootstrapped over prompts; a comparison resamples the same prompts on both sides and forms its ratio from
the counts, never from a summary. The seed is the policy's, so equal reports get equal checks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from specdist.consistency import comparison_fault, count_faults, non_finite_numbers, prompts_by_id, texts_recorded
from specdist.errors import ArtifactError
from specdist.gate_check import SHOWN, make_check, some
from specdist.gate_policy import GatePolicy
from specdist.metrics import (
    bootstrap_length_ratios,
    bootstrap_lengths,
    interval,
    permutation_p_value,
    pooled_length,
    prompts_to_decide,
)
from specdist.schema import AcceptanceResult, EvalReport, GateCheck, PromptCounts

_GO_BACK = "restore it, or go back to an earlier champion with `specdist registry rollback MODEL`"
_ALIKE = (
    "evaluate with the settings that the champion was evaluated with, or publish under another --model_name, where no "
    "champion serves yet"
)


def statistical_checks(report: EvalReport, primary: AcceptanceResult, policy: GatePolicy) -> list[GateCheck]:
    """Enough prompts; τ above the floor; τ above that of the untrained drafter on the same prompts."""
    prompts = list(prompts_by_id(primary).values())
    drafted = sum(p.num_drafts > 0 for p in prompts)
    enough = make_check(
        "prompts",
        drafted >= policy.min_prompts,
        f"{drafted} prompts with drafts" + ("" if drafted >= policy.min_prompts else "; evaluate on more"),
        on_failure="hold",
        observed=drafted,
        threshold=policy.min_prompts,
        num_prompts_needed=None if drafted >= policy.min_prompts else policy.min_prompts,
    )
    untrained = list(prompts_by_id(report.untrained).values())
    bar = 1.0 + policy.min_gain_over_untrained
    gain = _ratio_check(
        "gain_over_untrained", prompts, untrained, policy, bar=bar, reject_below=1.0, than="untrained", permuted=True
    )
    return [enough, _floor_check(prompts, policy), gain]


def champion_checks(
    report: EvalReport,
    primary: AcceptanceResult,
    champion: EvalReport | None,
    version: str | None,
    policy: GatePolicy,
    *,
    fault: str = "",
) -> list[GateCheck]:
    """Better than the champion overall, in no domain worse than the margin; none where there is no champion.

    `fault` says why the champion's report could not be read, where it could not: that holds, as one that cannot be
    compared does.
    """
    if champion is None:
        if version is None:
            return []
        words = f"; {fault}" if fault else ""
        reason = f"champion points to version {version}, which has no readable report{words}; {_GO_BACK}"
        return [make_check("champion_report", False, reason, on_failure="hold")]
    faults = _champion_faults(champion, report)
    if not faults and champion.target != report.target:
        reason = (
            f"made for {report.target.model_id}, the champion for {champion.target.model_id}: weights, tokenizer or "
            "chat template differ"
        )
        return [make_check("champion_target", False, reason)]
    theirs = None if faults else champion.result(primary.setting, primary.num_speculative_tokens)
    if theirs is None:
        return [make_check("champion_report", False, f"not comparable: {some(faults)}", on_failure="hold")]
    ours_by_id, theirs_by_id = prompts_by_id(primary), prompts_by_id(theirs)
    pair = list(ours_by_id.values()), list(theirs_by_id.values())
    overall = _ratio_check(
        "gain_over_champion", *pair, policy, bar=1.0, reject_below=1.0, than="champion", champion=True, permuted=True
    )
    reason = overall.reason
    if not overall.passed:
        reason += f"; trained on {report.num_training_rows:,} rows, the champion on {champion.num_training_rows:,}"
    if not texts_recorded(primary, theirs):
        reason += "; an older report does not say how its texts were written, so that they are the same is not checked"
    return [replace(overall, reason=reason), *_domain_checks(ours_by_id, theirs_by_id, policy)]


def other_checks(
    report: EvalReport, primary: AcceptanceResult, policy: GatePolicy, attempts: int, p_value: float | None
) -> list[GateCheck]:
    """Speed at each batch size, both means of acceptance, rules of thumb, and how often these prompts were used.

    `attempts`: drafters judged on these evaluation prompts so far, this one included; `p_value`: this one's.
    """
    speeds = [_speed_check(report, policy, size) for size in policy.speed_batch_sizes]
    return [*speeds, *_acceptance_rates(primary), *_rule_checks(report, primary, policy), _attempts(attempts, p_value)]


def bounds(samples: np.ndarray, policy: GatePolicy) -> tuple[float, float]:
    """The interval of bootstrap samples; where a resampling drafted nothing, it is as wide as can be."""
    if not np.isfinite(samples).all():
        return 0.0, math.inf
    low, high = interval(samples, policy.confidence)
    return low, high


def _needed(
    samples: np.ndarray, estimate: float, bar: float, reject_below: float, num_prompts: int, policy: GatePolicy
) -> int | None:
    """Prompts that would pass or reject, were the true value the `estimate`; None where none would."""
    effect = estimate - bar if estimate > bar else reject_below - estimate
    if effect < 0:  # between the two bars: neither passed nor rejected, however many prompts there are
        return None
    return prompts_to_decide(effect, float(np.std(samples)), num_prompts, policy.confidence)


def _needed_words(needed: int | None) -> str:
    if needed is None:
        return "; no number of prompts decides a difference as small as this"
    digits = 10 ** max(0, len(str(needed)) - 2)
    return f"; about {-(-needed // digits) * digits:,} prompts would decide it, were the truth what was observed"


def _ratio_check(
    name: str,
    candidate: Sequence[PromptCounts],
    other: Sequence[PromptCounts],
    policy: GatePolicy,
    *,
    bar: float,
    reject_below: float,
    than: str,
    champion: bool = False,
    permuted: bool = False,
) -> GateCheck:
    """Passed iff the interval of τ(candidate) / τ(other), same prompts, lies above `bar`.

    Failing rejects where the interval lies below `reject_below`; else it holds and says how many prompts would decide.
    `permuted` shows the p-value of no difference beside it.
    """
    with np.errstate(all="ignore"):
        samples = bootstrap_length_ratios(candidate, other, seed=policy.seed)
        p_value = permutation_p_value(candidate, other, seed=policy.seed) if permuted else None
    low, high = bounds(samples, policy)
    ours, theirs = pooled_length(candidate), pooled_length(other)
    reason = f"τ {ours:.3f}, {than} {theirs:.3f}: {ours / theirs - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
    if p_value is not None:
        reason += f", permutation p {p_value:.2g}"
    held, needed = low <= bar and high >= reject_below, None
    if low <= bar:
        reason += f"; the low end has to lie above {bar - 1:.1%}"
    if held:
        needed = _needed(samples, ours / theirs, bar, reject_below, len(candidate), policy)
        reason += _needed_words(needed)
    return make_check(
        name,
        low > bar,
        reason,
        on_failure="reject" if high < reject_below else "hold",
        observed=low,
        threshold=bar,
        champion=theirs if champion else None,
        p_value=p_value,
        num_prompts_needed=needed,
    )


def _floor_check(prompts: Sequence[PromptCounts], policy: GatePolicy) -> GateCheck:
    with np.errstate(all="ignore"):
        samples = bootstrap_lengths(prompts, seed=policy.seed)
    low, high = bounds(samples, policy)
    length, floor, needed = pooled_length(prompts), policy.min_mean_accepted_length, None
    reason = f"τ {length:.3f} ({low:.3f} to {high:.3f})"
    if low <= floor:
        reason += f", has to exceed {floor:g}"
    if low <= floor <= high:
        needed = _needed(samples, length, floor, floor, len(prompts), policy)
        reason += _needed_words(needed)
    return make_check(
        "mean_accepted_length",
        low > floor,
        reason,
        on_failure="reject" if high < floor else "hold",
        observed=low,
        threshold=floor,
        num_prompts_needed=needed,
    )


def _champion_faults(champion: EvalReport, report: EvalReport) -> list[str]:
    """Why the champion's acceptance cannot be compared with the candidate's, and what to do, in words."""
    try:
        bad = non_finite_numbers(champion)
    except ArtifactError as error:
        return [f"the champion's report is of a wrong form: {error}; {_GO_BACK}"]
    if bad:
        return [f"the champion's report is not finite at {some(bad)}; {_GO_BACK}"]
    if champion.target != report.target:
        return []  # a fault of the candidate
    if fault := comparison_fault(report, champion):
        return [f"the champion {fault}; {_ALIKE}"]
    faults = count_faults(champion)
    return [f"the champion's report: {some(faults)}; {_GO_BACK}"] if faults else []


def _domain_checks(
    ours: dict[str, PromptCounts], theirs: dict[str, PromptCounts], policy: GatePolicy
) -> list[GateCheck]:
    """No domain may lose more than the margin. One with few prompts fails only where it is shown to lose more."""
    checks, bar = [], 1.0 - policy.domain_margin
    for domain in sorted({p.domain for p in ours.values()}):
        ids = [i for i, p in ours.items() if p.domain == domain]
        pair = [ours[i] for i in ids], [theirs[i] for i in ids]
        check = _ratio_check(
            f"domain:{domain}", *pair, policy, bar=bar, reject_below=bar, than="champion", champion=True
        )
        if len(ids) < policy.min_domain_prompts and (check.passed or check.on_failure == "hold"):
            reason = f"{SHOWN}{len(ids)} prompts, held from {policy.min_domain_prompts}; {check.reason}"
            check = replace(check, passed=True, on_failure="hold", reason=reason)
        checks.append(check)
    return checks


def _speed_check(report: EvalReport, policy: GatePolicy, batch_size: int) -> GateCheck:
    """The speed-up at the draft length that is served; judged only where the policy asks for one."""
    speed = next((speed for speed in report.speeds if speed.batch_size == batch_size), None)
    chains = [p for p in speed.points if p.num_tree_nodes is None] if speed else []
    point = next((p for p in chains if p.num_speculative_tokens == report.served_length), None)
    # The interval is over prompts: of one prompt it has no width, which is no certainty
    known = point and speed and speed.num_prompts > 1 and len(point.speedup_interval) == 2
    low, high = point.speedup_interval if point and known else (0.0, math.inf)
    measured = f"{point.speedup:.2f} times the target alone ({low:.2f} to {high:.2f})" if point else "not measured"
    reason = f"{measured} at γ={report.served_length}, batch size {batch_size}"
    name = f"speedup:batch_{batch_size}"
    if policy.min_speedup is None:
        return make_check(name, True, SHOWN + reason, on_failure="hold", observed=point.speedup if point else None)
    return make_check(
        name,
        low > policy.min_speedup,
        reason,
        on_failure="reject" if high < policy.min_speedup else "hold",
        observed=low if point else None,
        threshold=policy.min_speedup,
    )


def _acceptance_rates(primary: AcceptanceResult) -> list[GateCheck]:
    """Both means by name (E18): the gate judges τ over all tokens; one that domains share equally may differ."""
    macro = fmean(summary.acceptance_rate for summary in primary.domains.values())
    total = primary.summary.acceptance_rate
    return [
        make_check("acceptance_rate:tokens", True, f"{SHOWN}accepted / drafted over all tokens", observed=total),
        make_check("acceptance_rate:domains", True, f"{SHOWN}mean over domains, each counts the same", observed=macro),
    ]


def _rule_checks(report: EvalReport, primary: AcceptanceResult, policy: GatePolicy) -> list[GateCheck]:
    """The field's rules of thumb; each is required or only shown, as the policy says."""
    size = report.num_parameters / report.num_target_parameters if report.num_target_parameters else None
    cost = report.speed.draft_cost_ratio if report.speed else None
    rules = [
        (
            "acceptance_rate",
            primary.summary.acceptance_rate,
            policy.min_acceptance_rate,
            1,
            "of drafted tokens accepted",
        ),
        ("draft_cost_ratio", cost, policy.max_draft_cost_ratio, -1, "of a target step to draft one token"),
        ("size_ratio", size, policy.max_size_ratio, -1, "of the target's parameters"),
    ]
    return [_rule_check(*rule, required=rule[0] in policy.required_rules) for rule in rules]


def _rule_check(name: str, value: float | None, limit: float, sign: int, words: str, *, required: bool) -> GateCheck:
    """A rule `value` ≥ `limit` (`sign` 1) or ≤ `limit` (−1)."""
    kept = value is not None and sign * value >= sign * limit
    asked = f"the rule of thumb is {'at least' if sign > 0 else 'at most'} {limit:g}"
    measured = "not measured" if value is None else f"{value:.3g} {words}"
    reason = f"{measured}; {asked}{', missed' if value is not None and not kept else ''}"
    return make_check(
        f"rule:{name}",
        kept or not required,
        reason if required else SHOWN + reason,
        on_failure="hold" if value is None else "reject",
        observed=value,
        threshold=limit,
    )


def _attempts(attempts: int, p_value: float | None) -> GateCheck:
    """How many drafters these prompts have judged: the best of many looks better than it is."""
    reason = f"{SHOWN}drafters judged on these evaluation prompts, this one included"
    if p_value is not None and attempts > 1:
        reason += f"; p times their number (Bonferroni) is {min(1.0, attempts * p_value):.2g}"
    return make_check("evaluation_attempts", True, reason, on_failure="hold", observed=attempts)
