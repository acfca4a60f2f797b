"""Owns the verdict on an evaluation report: promote, hold or reject, with every check that led to it.

Pure: a report, the champion's report and a policy go in, a decision comes out; no clock, no file, no network, fixed
seeds. Here are the hard checks, the verdict and its text; what is concluded from counts is in gate_statistics.py.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from specdist.consistency import count_faults, non_finite_numbers
from specdist.errors import ArtifactError
from specdist.gate_check import SHOWN, make_check, some
from specdist.gate_policy import GatePolicy, load_policy
from specdist.gate_statistics import bounds, champion_checks, other_checks, statistical_checks
from specdist.metrics import bootstrap_perplexity_ratios
from specdist.schema import Certification, EvalReport, GateCheck, GateDecision
from specdist.schema_reload import Reload

__all__ = ["EXIT_CODES", "GatePolicy", "decide", "exit_code", "format_decision", "load_policy"]

EXIT_CODES = {"promote": 0, "hold": 3, "reject": 4}
_ZERO_ACCEPTANCE_DRAFTS = 100  # fewer drafted tokens may miss by chance; the floor judges those
_SOUND = {"finite_numbers", "counts_consistent"}  # without these there is nothing to compare
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
    champion_fault: str = "",
    export_faults: Sequence[str] = (),
    attempts: int = 1,
) -> GateDecision:
    """Judge `report` against `policy` and, where there is one, the `champion`: the verdict and all checks.

    `champion_fault`: why a champion's report could not be read; `export_faults`: what is wrong with the files that
    would serve; `attempts`: drafters judged on these evaluation prompts so far, this one included. A failed check that
    says "reject" rejects; else one that says "hold" holds; else the drafter is promoted.
    """
    checks = [_export_check(export_faults), *_hard_checks(report, policy)]
    sound = {check.name for check in checks if check.passed} >= _SOUND
    if sound and (primary := report.primary) is not None:
        checks += statistical_checks(report, primary, policy)
        checks += champion_checks(report, primary, champion, champion_version, policy, fault=champion_fault)
        p_values = [check.p_value for check in checks if check.p_value is not None]
        checks += other_checks(report, primary, policy, attempts, p_values[-1] if p_values else None)
    failed = [check for check in checks if not check.passed]
    verdict = next((v for v in ("reject", "hold") if any(check.on_failure == v for check in failed)), "promote")
    deciding = [f"{check.name}: {check.reason}" for check in failed if check.on_failure == verdict]
    reason = some(deciding, separator="; ") or _promotion_reason(checks, champion_version)
    return GateDecision(verdict, reason, checks, report_sha256, champion_version, _plain_policy(policy))


def exit_code(decision: GateDecision) -> int:
    """Exit status of a command that gates: 0 only for promote, 3 for hold, 4 for reject."""
    return EXIT_CODES.get(decision.verdict, EXIT_CODES["reject"])


def format_decision(decision: GateDecision, width: int = 120) -> str:
    """The decision as an aligned table of plain text, reasons wrapped to `width` columns."""
    rows: list[tuple[str, ...]] = [("check", "result", "observed", "required", "champion")]
    for check in decision.checks:
        result = "ok" if check.passed else check.on_failure.upper()
        if check.reason.startswith(SHOWN):
            result = "shown"
        rows.append((check.name, result, *map(_cell, (check.observed, check.threshold, check.champion))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    reasons = ["reason", *(check.reason.removeprefix(SHOWN) for check in decision.checks)]
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


def _export_check(faults: Sequence[str]) -> GateCheck:
    return make_check("export", not faults, some(faults, separator="; ") or "the files are those that were exported")


def _hard_checks(report: EvalReport, policy: GatePolicy) -> list[GateCheck]:
    try:
        invalid, bad = report.invalid_reasons, non_finite_numbers(report)
    except ArtifactError as error:
        return [make_check("report_readable", False, f"{error}; evaluate again")]
    checks = [
        _reload_check(report),
        make_check("report_valid", not invalid, "; ".join(invalid) or "evaluation raised no objection"),
        make_check("finite_numbers", not bad, f"not finite: {some(bad)}; evaluate again" if bad else "all finite"),
    ]
    if bad:
        return checks
    faults = count_faults(report)
    checks.append(
        make_check(
            "counts_consistent", not faults, some(faults) if faults else "ratios agree with the counts per prompt"
        )
    )
    checks.append(_accepted_check(report))
    names = dict.fromkeys([*policy.required_certifications, report.primary_setting])
    names.update(dict.fromkeys(c.setting for c in report.certifications))
    checks += [_certification_check(report, name) for name in names]
    return [*checks, _fidelity_check(report), *([] if report.lossless else [_quality_check(report, policy)])]


def _reload_check(report: EvalReport) -> GateCheck:
    """What serves are files: a fresh process must have read of them what the process that measured had in memory."""
    reason = _reload_fault(report.reload)
    if reason or report.reload is None:
        return make_check("fresh_process", False, reason)
    measured = report.reload.measured
    tokens = sum(map(len, measured.drafts))
    said = f"a fresh process reads the same {measured.num_tensors} tensors and drafts the same {tokens} tokens"
    return make_check("fresh_process", True, said)


def _reload_fault(reload: Reload | None) -> str:
    if reload is None:
        return "missing: a fresh process has to read the export; evaluate again"
    measured, fresh = reload.measured, reload.fresh
    if fresh is None:
        return f"a fresh process cannot read the export: {reload.fault or 'it said nothing'}"
    if (measured.num_tensors, measured.tensors_sha256) != (fresh.num_tensors, fresh.tensors_sha256):
        return (
            f"a fresh process has other tensors ({fresh.num_tensors}) than were measured ({measured.num_tensors}): the "
            "files lack some, or hold them under names that are not read; export again"
        )
    if measured.drafts != fresh.drafts:
        pairs = zip_longest(measured.drafts, fresh.drafts)
        block, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"in block {block} a fresh process drafts {theirs}, and {ours} was measured; evaluate again"
    return "" if any(measured.drafts) else "nothing was drafted to compare; evaluate on prompts with longer answers"


def _accepted_check(report: EvalReport) -> GateCheck:
    dead = [
        f"{r.setting} γ={r.num_speculative_tokens}"
        for r in report.acceptance
        if sum(p.num_draft_tokens for p in r.prompts) >= _ZERO_ACCEPTANCE_DRAFTS
        and sum(p.num_accepted_tokens for p in r.prompts) <= 0
    ]
    hint = (
        f"the target accepted none of {_ZERO_ACCEPTANCE_DRAFTS} or more drafted tokens at {some(dead)}: the exported "
        "files were probably read wrongly; compare tensor names and shapes, vocabulary and tokenizer with the export"
    )
    accepted = sum(p.num_accepted_tokens for p in report.primary.prompts) if report.primary else None
    return make_check("accepted_tokens", not dead, hint if dead else "the target accepts drafts", observed=accepted)


def _certification_check(report: EvalReport, setting: str) -> GateCheck:
    found = [c for c in report.certifications if c.setting == setting]
    faults = [fault for c in found if (fault := _certification_fault(c, report))]
    if all(c.num_tree_nodes for c in found):
        faults = [f"missing: check replay at {setting!r} with the real decoder"]
    decoder = found[0].decoder_mean_accepted_length if found else None
    replay = found[0].replay_mean_accepted_length if found else None
    reason = "; ".join(faults) or "the real decoder confirms the replayed counts"
    return make_check(f"certification:{setting}", not faults, reason, observed=decoder, threshold=replay)


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
        return make_check("task_quality", False, reason, on_failure="hold")
    low, high = bounds(bootstrap_perplexity_ratios(quality.answers, seed=policy.seed), policy)
    bar, enough = 1.0 + allowed, len(quality.answers) >= policy.min_prompts
    reason = (
        f"the changed target's perplexity on the original's answers to {len(quality.answers)} prompts: "
        f"{quality.perplexity_ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}); greedy answers that stay the same: "
        f"{quality.num_identical} of {quality.num_greedy}"
    )
    reason += "" if enough else f"; expected {policy.min_prompts} prompts or more"
    reason += "" if high <= bar else f"; the high end must not exceed {bar - 1:+.1%}"
    failure = "reject" if low > bar else "hold"
    return make_check("task_quality", enough and high <= bar, reason, on_failure=failure, observed=high, threshold=bar)


def _fidelity_check(report: EvalReport) -> GateCheck:
    f = report.fidelity
    if f is None or f.num_prompts < 1:
        return make_check("fidelity", False, "missing: compare speculative with plain greedy output")
    real = [d for d in f.divergences if not d.near_tie or f.dtype == "float32"]
    share, counted = f.num_identical / f.num_prompts, f.num_identical + len(f.divergences) == f.num_prompts
    if not counted:
        reason = f"{f.num_identical} identical, {len(f.divergences)} divergent, yet {f.num_prompts} outputs: incomplete"
    elif real:
        d = real[0]
        reason = (
            f"{len(real)} of {f.num_prompts} outputs differ in {f.dtype}, first {d.prompt_id} at token {d.position} "
            f"(logit gap {d.logit_gap:.3g}): the decoder or its cache is wrong"
        )
    else:
        ties = f", {len(f.divergences)} differ at a near-tie of the target's logits" if f.divergences else ""
        reason = f"{f.num_identical} of {f.num_prompts} outputs identical in {f.dtype}{ties}"
    return make_check("fidelity", counted and not real, reason, observed=share, threshold=1.0)
