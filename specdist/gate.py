"""Owns the verdict on an evaluation report: promote, hold or reject, with every check that led to it.

Pure: a report, the champion's report and a policy go in, a decision comes out; no clock, no file, no network, fixed
seeds. Intervals are bootstrapped over prompts; a comparison resamples the same prompts on both sides and forms its
ratio from the counts, never from a summary.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np

from specdist.consistency import count_faults, measured_at, non_finite_numbers, prompts_by_id
from specdist.gate_policy import GatePolicy, load_policy
from specdist.metrics import (
    bootstrap_length_ratios,
    bootstrap_lengths,
    bootstrap_perplexity_ratios,
    interval,
    pooled_length,
)
from specdist.schema import AcceptanceResult, Certification, EvalReport, GateCheck, GateDecision, PromptCounts

__all__ = ["EXIT_CODES", "GatePolicy", "decide", "exit_code", "format_decision", "load_policy"]

EXIT_CODES = {"promote": 0, "hold": 3, "reject": 4}
_ZERO_ACCEPTANCE_DRAFTS = 100  # fewer drafted tokens may miss by chance; the floor judges those
_SOUND = ("finite_numbers", "counts_consistent")  # without these there is nothing to compare
_SHOWN = "shown: "  # starts the reason of a check that informs and does not judge
_FOOTNOTE = (
    "Where an interval is given in brackets, `observed` is its low end: that is what has to exceed `required`. Of "
    "task_quality it is the high end, which must not."
)


def decide(
    report: EvalReport,
    champion: EvalReport | None,
    policy: GatePolicy,
    *,
    report_sha256: str,
    champion_version: str | None,
) -> GateDecision:
    """Judge `report` against `policy` and, where there is one, the `champion`: the verdict and all checks.

    A failed check that says "reject" rejects; else one that says "hold" holds; else the drafter is promoted.
    Raises ArtifactError where a report holds a value of a wrong type.
    """
    checks = _hard_checks(report, policy)
    primary = report.primary
    if primary is not None and all(check.passed for check in checks if check.name in _SOUND):
        checks += _statistical_checks(report, primary, policy)
        checks += _champion_checks(report, primary, champion, champion_version, policy)
        checks += [_speed_check(report, policy), *_acceptance_rates(primary)]
    failed = [check for check in checks if not check.passed]
    verdict = next((v for v in ("reject", "hold") if any(check.on_failure == v for check in failed)), "promote")
    deciding = [f"{check.name}: {check.reason}" for check in failed if check.on_failure == verdict]
    reason = _some(deciding, separator="; ") or _promotion_reason(checks, champion_version)
    return GateDecision(verdict, reason, checks, report_sha256, champion_version, _plain_policy(policy))


def exit_code(decision: GateDecision) -> int:
    """Exit status of a command that gates: 0 only for promote, 3 for hold, 4 for reject."""
    return EXIT_CODES.get(decision.verdict, EXIT_CODES["reject"])


def format_decision(decision: GateDecision, width: int = 120) -> str:
    """The decision as an aligned table of plain text, reasons wrapped to `width` columns."""
    rows: list[tuple[str, ...]] = [("check", "result", "observed", "required", "champion")]
    for check in decision.checks:
        result = "ok" if check.passed else check.on_failure.upper()
        if check.reason.startswith(_SHOWN):
            result = "shown"
        rows.append((check.name, result, *map(_cell, (check.observed, check.threshold, check.champion))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    reasons = ["reason", *(check.reason.removeprefix(_SHOWN) for check in decision.checks)]
    lines = [line for row, reason in zip(rows, reasons, strict=True) for line in _lines(row, widths, reason, width)]
    version = decision.champion_version
    against = "no champion yet" if version is None else f"against champion version {version}"
    head = textwrap.wrap(f"{decision.verdict.upper()} ({against}): {decision.reason}", width, subsequent_indent="  ")
    rule, note = "-" * min(width, max(map(len, lines))), textwrap.fill(_FOOTNOTE, width)
    return "\n".join([*head, "", lines[0], rule, *lines[1:], "", note])


def _lines(row: Sequence[str], widths: Sequence[int], reason: str, width: int) -> list[str]:
    cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
    start = "  ".join(cells) + "  "
    wrapped = textwrap.wrap(reason, max(width - len(start), 30), break_long_words=False) or [""]
    return [start + wrapped[0], *(" " * len(start) + line for line in wrapped[1:])]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(int(value)) if value == int(value) and abs(value) >= 10 else f"{value:.4g}"


def _plain_policy(policy: GatePolicy) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(policy).items()}


def _promotion_reason(checks: Sequence[GateCheck], champion_version: str | None) -> str:
    reasons = {check.name: check.reason for check in checks}
    key = "gain_over_champion" if champion_version is not None else "gain_over_untrained"
    return reasons.get(key) or reasons.get("gain_over_untrained", "all checks passed")


def _check(
    name: str,
    passed: bool,
    reason: str,
    *,
    on_failure: str = "reject",
    observed: float | None = None,
    threshold: float | None = None,
    champion: float | None = None,
) -> GateCheck:
    observed, threshold, champion = (
        value if value is None or math.isfinite(value) else None for value in (observed, threshold, champion)
    )
    return GateCheck(name, passed, observed, threshold, champion, on_failure, reason)


def _hard_checks(report: EvalReport, policy: GatePolicy) -> list[GateCheck]:
    invalid, bad = report.invalid_reasons, non_finite_numbers(report)
    checks = [
        _check("report_valid", not invalid, "; ".join(invalid) or "evaluation raised no objection"),
        _check("finite_numbers", not bad, f"not finite: {_some(bad)}; evaluate again" if bad else "all finite"),
    ]
    if bad:
        return checks
    faults = count_faults(report)
    checks.append(
        _check("counts_consistent", not faults, _some(faults) if faults else "ratios agree with the counts per prompt")
    )
    checks.append(_accepted_check(report))
    names = dict.fromkeys([*policy.required_certifications, report.primary_setting])
    names.update(dict.fromkeys(c.setting for c in report.certifications))
    checks += [_certification_check(report, name) for name in names]
    return [*checks, _fidelity_check(report), *([] if report.lossless else [_quality_check(report, policy)])]


def _some(items: Sequence[str], *, limit: int = 3, separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def _accepted_check(report: EvalReport) -> GateCheck:
    dead = [
        f"{r.setting} γ={r.num_speculative_tokens}"
        for r in report.acceptance
        if sum(p.num_draft_tokens for p in r.prompts) >= _ZERO_ACCEPTANCE_DRAFTS
        and sum(p.num_accepted_tokens for p in r.prompts) <= 0
    ]
    hint = (
        f"the target accepted none of {_ZERO_ACCEPTANCE_DRAFTS} or more drafted tokens at {_some(dead)}: the exported "
        "files were probably read wrongly; compare tensor names and shapes, vocabulary and tokenizer with the export"
    )
    accepted = sum(p.num_accepted_tokens for p in report.primary.prompts) if report.primary else None
    return _check("accepted_tokens", not dead, hint if dead else "the target accepts drafts", observed=accepted)


def _certification_check(report: EvalReport, setting: str) -> GateCheck:
    found = [c for c in report.certifications if c.setting == setting]
    faults = [fault for c in found if (fault := _certification_fault(c, report))]
    if not found:
        faults = [f"missing: check replay at {setting!r} with the real decoder"]
    decoder = found[0].decoder_mean_accepted_length if found else None
    replay = found[0].replay_mean_accepted_length if found else None
    reason = "; ".join(faults) or "the real decoder confirms the replayed counts"
    return _check(f"certification:{setting}", not faults, reason, observed=decoder, threshold=replay)


def _certification_fault(c: Certification, report: EvalReport) -> str | None:
    if c.num_prompts < 1:
        return "empty: certified on no prompt"
    replay, decoder = c.replay_mean_accepted_length, c.decoder_mean_accepted_length
    numbers = f"replay τ {replay:.4g}, decoder τ {decoder:.4g}"
    if not c.passed:
        return f"{numbers}: they disagree; the replayed acceptance is not what serving gives"
    low, high = c.replay_interval if len(c.replay_interval) == 2 else (math.inf, math.inf)
    agree = low - 1e-9 <= decoder <= high + 1e-9
    if any(r.setting == c.setting and r.temperature == 0 for r in report.acceptance):
        agree = agree and not c.mismatched_prompts and math.isclose(replay, decoder, rel_tol=1e-9)
    return None if agree else f"{numbers}: marked as passed, but the record does not support it; certify again"


def _quality_check(report: EvalReport, policy: GatePolicy) -> GateCheck:
    """A changed target is passed iff the interval of its perplexity over the original's lies below what is allowed."""
    quality, allowed = report.quality, policy.max_perplexity_increase
    if quality is None or not quality.answers or allowed is None:
        wanted = "set max_perplexity_increase" if allowed is None else "its report has none, evaluate it again"
        reason = f"a lossy drafter changes the output and needs a task-quality check: {wanted}"
        return _check("task_quality", False, reason, on_failure="hold")
    with np.errstate(all="ignore"):
        low, high = _bounds(bootstrap_perplexity_ratios(quality.answers, seed=policy.seed), policy)
    bar, enough = 1.0 + allowed, len(quality.answers) >= policy.min_prompts
    reason = (
        f"the changed target's perplexity on the original's answers to {len(quality.answers)} prompts: "
        f"{quality.perplexity_ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}); greedy answers that stay the same: "
        f"{quality.num_identical} of {quality.num_greedy}"
    )
    reason += "" if enough else f"; expected {policy.min_prompts} prompts or more"
    reason += "" if high <= bar else f"; the high end must not exceed {bar - 1:+.1%}"
    failure = "reject" if low > bar else "hold"
    return _check("task_quality", enough and high <= bar, reason, on_failure=failure, observed=high, threshold=bar)


def _fidelity_check(report: EvalReport) -> GateCheck:
    f = report.fidelity
    if f is None or f.num_prompts < 1:
        return _check("fidelity", False, "missing: compare speculative with plain greedy output")
    real = [d for d in f.divergences if not d.near_tie or f.dtype == "float32"]
    share, counted = f.num_identical / f.num_prompts, f.num_identical + len(f.divergences) == f.num_prompts
    if not counted:
        reason = f"{f.num_identical} identical, {len(f.divergences)} divergent, yet {f.num_prompts} prompts: incomplete"
    elif real:
        d = real[0]
        reason = (
            f"{len(real)} of {f.num_prompts} outputs differ in {f.dtype}, first {d.prompt_id} at token {d.position} "
            f"(logit gap {d.logit_gap:.3g}): the decoder or its cache is wrong"
        )
    else:
        ties = f", {len(f.divergences)} differ at a near-tie of the target's logits" if f.divergences else ""
        reason = f"{f.num_identical} of {f.num_prompts} outputs identical in {f.dtype}{ties}"
    return _check("fidelity", counted and not real, reason, observed=share, threshold=1.0)


def _bounds(samples: np.ndarray, policy: GatePolicy) -> tuple[float, float]:
    """The interval of bootstrap samples; where a resampling drafted nothing, it is as wide as can be."""
    if not np.isfinite(samples).all():
        return 0.0, math.inf
    low, high = interval(samples, policy.confidence)
    return low, high


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
) -> GateCheck:
    """Passed iff the interval of τ(candidate) / τ(other), same prompts, lies above `bar`.

    Failing rejects where the interval lies below `reject_below`; else it holds.
    """
    with np.errstate(all="ignore"):
        low, high = _bounds(bootstrap_length_ratios(candidate, other, seed=policy.seed), policy)
    ours, theirs = pooled_length(candidate), pooled_length(other)
    reason = f"τ {ours:.3f}, {than} {theirs:.3f}: {ours / theirs - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
    if low <= bar:
        reason += f"; the low end has to lie above {bar - 1:.1%}"
    return _check(
        name,
        low > bar,
        reason,
        on_failure="reject" if high < reject_below else "hold",
        observed=low,
        threshold=bar,
        champion=theirs if champion else None,
    )


def _statistical_checks(report: EvalReport, primary: AcceptanceResult, policy: GatePolicy) -> list[GateCheck]:
    prompts = list(prompts_by_id(primary).values())
    drafted = sum(p.num_drafts > 0 for p in prompts)
    enough = _check(
        "prompts",
        drafted >= policy.min_prompts,
        f"{drafted} prompts with drafts" + ("" if drafted >= policy.min_prompts else "; evaluate on more"),
        on_failure="hold",
        observed=drafted,
        threshold=policy.min_prompts,
    )
    with np.errstate(all="ignore"):
        low, high = _bounds(bootstrap_lengths(prompts, seed=policy.seed), policy)
    floor = policy.min_mean_accepted_length
    least = _check(
        "mean_accepted_length",
        low > floor,
        f"τ {pooled_length(prompts):.3f} ({low:.3f} to {high:.3f})"
        + ("" if low > floor else f", has to exceed {floor:g}"),
        on_failure="reject" if high < floor else "hold",
        observed=low,
        threshold=floor,
    )
    untrained = list(prompts_by_id(report.untrained).values())
    bar = 1.0 + policy.min_gain_over_untrained
    gain = _ratio_check("gain_over_untrained", prompts, untrained, policy, bar=bar, reject_below=1.0, than="untrained")
    return [enough, least, gain]


def _champion_checks(
    report: EvalReport, primary: AcceptanceResult, champion: EvalReport | None, version: str | None, policy: GatePolicy
) -> list[GateCheck]:
    if champion is None:
        if version is None:
            return []
        reason = f"champion points to version {version}, which has no readable report; repair or roll back the registry"
        return [_check("champion_report", False, reason, on_failure="hold")]
    if champion.target != report.target:
        reason = f"made for {report.target.model_id}, the champion for {champion.target.model_id}: hashes differ"
        return [_check("champion_target", False, reason)]
    theirs = champion.result(primary.setting, primary.num_speculative_tokens)
    faults = _champion_faults(champion, theirs, report, primary)
    if faults or theirs is None:
        reason = f"not comparable: {_some(faults)}; evaluate the champion again as the candidate was"
        return [_check("champion_report", False, reason, on_failure="hold")]
    ours_by_id, theirs_by_id = prompts_by_id(primary), prompts_by_id(theirs)
    overall = _ratio_check(
        "gain_over_champion",
        list(ours_by_id.values()),
        list(theirs_by_id.values()),
        policy,
        bar=1.0,
        reject_below=1.0,
        than="champion",
        champion=True,
    )
    if not overall.passed:
        data = f"; trained on {report.num_training_rows:,} rows, the champion on {champion.num_training_rows:,}"
        overall = replace(overall, reason=overall.reason + data)
    return [overall, *_domain_checks(ours_by_id, theirs_by_id, policy)]


def _champion_faults(
    champion: EvalReport, theirs: AcceptanceResult | None, report: EvalReport, primary: AcceptanceResult
) -> list[str]:
    """Why the champion's acceptance cannot be compared with the candidate's, in words."""
    if bad := non_finite_numbers(champion):
        return [f"the champion's report is not finite at {_some(bad)}"]
    if theirs is None:
        return [f"the champion was not measured at {primary.setting} γ={primary.num_speculative_tokens}"]
    if measured_at(theirs) != measured_at(primary):
        return [f"the champion was measured at {measured_at(theirs)}, the candidate at {measured_at(primary)}"]
    same_ids = prompts_by_id(theirs).keys() == prompts_by_id(primary).keys()
    if not same_ids or champion.eval_prompts_sha256 != report.eval_prompts_sha256:
        return ["the champion was measured on other prompts"]
    return count_faults(champion)


def _domain_checks(
    ours: dict[str, PromptCounts], theirs: dict[str, PromptCounts], policy: GatePolicy
) -> list[GateCheck]:
    """No domain may lose more than the margin; a domain with few prompts is shown, not judged."""
    checks, bar = [], 1.0 - policy.domain_margin
    for domain in sorted({p.domain for p in ours.values()}):
        ids = [i for i, p in ours.items() if p.domain == domain]
        pair = [ours[i] for i in ids], [theirs[i] for i in ids]
        check = _ratio_check(
            f"domain:{domain}", *pair, policy, bar=bar, reject_below=bar, than="champion", champion=True
        )
        if len(ids) < policy.min_domain_prompts:
            reason = f"{_SHOWN}{len(ids)} prompts, judged from {policy.min_domain_prompts}; {check.reason}"
            check = replace(check, passed=True, on_failure="hold", reason=reason)
        checks.append(check)
    return checks


def _speed_check(report: EvalReport, policy: GatePolicy) -> GateCheck:
    """The speed-up at the draft length that is served; judged only where the policy asks for one."""
    chains = [p for p in report.speed.points if p.num_tree_nodes is None] if report.speed else []
    point = next((p for p in chains if p.num_speculative_tokens == report.num_speculative_tokens), None)
    low, high = point.speedup_interval if point and len(point.speedup_interval) == 2 else (0.0, math.inf)
    measured = f"{point.speedup:.2f} times the target alone ({low:.2f} to {high:.2f})" if point else "not measured"
    reason = f"{measured} at γ={report.num_speculative_tokens}"
    if policy.min_speedup is None:
        return _check("speedup", True, _SHOWN + reason, on_failure="hold", observed=point.speedup if point else None)
    return _check(
        "speedup",
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
        _check("acceptance_rate:tokens", True, f"{_SHOWN}accepted / drafted over all tokens", observed=total),
        _check("acceptance_rate:domains", True, f"{_SHOWN}mean over domains, each counts the same", observed=macro),
    ]
