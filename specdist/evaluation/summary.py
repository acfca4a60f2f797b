"""Owns what a report says in plain words and in one line of a table."""

from collections.abc import Sequence

from specdist.metrics import bootstrap_length_ratios, interval
from specdist.schema import (
    AcceptanceResult,
    Certification,
    EvalReport,
    Fidelity,
    GateDecision,
    Speed,
    SpeedPoint,
)
from specdist.schema_quality import TargetQuality

MAX_PREDICTION_ERROR = 0.15  # share by which measured speed may differ from predicted without a word


def best_speed(report: EvalReport) -> SpeedPoint | None:
    """The fastest measured draft length; None where speed was not measured."""
    points = report.speed.points if report.speed else []
    return max(points, key=lambda point: point.speedup, default=None)


def drafted(point: SpeedPoint | Certification) -> str:
    """What a step drafts: "γ=4", "tree of 16 nodes"."""
    return f"tree of {point.num_tree_nodes} nodes" if point.num_tree_nodes else f"γ={point.num_speculative_tokens}"


def mispredicted(speed: Speed) -> list[str]:
    """Sentences on points whose measured speed is more than MAX_PREDICTION_ERROR from the predicted one; or none."""
    found = [
        f"At {drafted(point)} the costs predict {point.predicted_speedup:.2f} times the target alone, but "
        f"{point.speedup:.2f} times was measured ({point.speedup / point.predicted_speedup - 1:+.0%})."
        for point in speed.points
        if abs(point.speedup / point.predicted_speedup - 1) > MAX_PREDICTION_ERROR
    ]
    advice = (
        f"That is more than {MAX_PREDICTION_ERROR:.0%} apart, so trust what was measured: predictions leave out the "
        "reading of the prompt, the growing text, and whatever else ran on this machine."
    )
    return [*found, advice] if found else []


def gain_over_untrained(report: EvalReport) -> tuple[float, list[float] | None] | None:
    """τ(drafter) / τ(untrained) − 1 and its 95 % interval, which needs the same prompts on both sides."""
    primary = report.primary
    if primary is None:
        return None
    gain = primary.summary.mean_accepted_length / report.untrained.summary.mean_accepted_length - 1.0
    ours, theirs = (sorted(r.prompts, key=lambda p: p.prompt_id) for r in (primary, report.untrained))
    if [p.prompt_id for p in ours] != [p.prompt_id for p in theirs]:
        return gain, None
    return gain, [bound - 1.0 for bound in interval(bootstrap_length_ratios(ours, theirs))]


def sentences(report: EvalReport) -> list[str]:
    """What was found: tokens per step, what training gained, whether it is faster here, whether output is unchanged."""
    primary = report.primary
    if primary is None:
        setting = f"{report.primary_setting}, {report.num_speculative_tokens} drafted tokens"
        return [f"The report has no acceptance at its primary setting ({setting}), so nothing can be concluded."]
    return [
        _length_words(primary),
        _gain_words(report),
        _speed_words(report.speed, best_speed(report)),
        _output_words(report.fidelity) if report.lossless else _quality_words(report.quality),
    ]


def _length_words(primary: AcceptanceResult) -> str:
    summary, drafted = primary.summary, primary.num_speculative_tokens
    low, high = summary.mean_accepted_length_interval
    return (
        f"With {drafted} drafted token{'s' if drafted > 1 else ''} per step ({primary.setting}), each step of the "
        f"target gives {summary.mean_accepted_length:.2f} tokens on average, 95 % interval {low:.2f} to {high:.2f}. "
        "This is τ; the target alone gives 1."
    )


def _gain_words(report: EvalReport) -> str:
    gain = gain_over_untrained(report)
    before = f"Before training the same drafter had τ {report.untrained.summary.mean_accepted_length:.2f}"
    if gain is None or gain[1] is None:
        return f"{before}, on other prompts, so the gain of training is not known."
    low, high = gain[1]
    bounds = f"95 % interval {low:+.1%} to {high:+.1%}"
    if low > 0:
        return f"{before}: training gained {gain[0]:.1%}, {bounds}."
    if high < 0:
        return f"{before}: training made it worse, {gain[0]:+.1%}, {bounds}."
    return f"{before}: training shows no gain that chance could not explain, {gain[0]:+.1%}, {bounds}."


def _speed_words(speed: Speed | None, best: SpeedPoint | None) -> str:
    if speed is None or best is None:
        return "Speed was not measured, so nothing is said about seconds."
    low, high = best.speedup_interval
    place = f"On {speed.hardware}, at batch size {speed.batch_size},"
    numbers = (
        f"{best.tokens_per_second:.1f} against {speed.target_tokens_per_second:.1f} tokens per second, "
        f"95 % interval {low:.2f} to {high:.2f} times"
    )
    at = f"with a {drafted(best)}" if best.num_tree_nodes else f"at draft length {best.num_speculative_tokens}"
    if len(speed.points) > 1:
        at += f", the best of {len(speed.points)} measured"
    if low > 1:
        return f"{place} it is {best.speedup:.2f} times as fast as the target alone {at} ({numbers})."
    if high < 1:
        return (
            f"{place} it is slower than the target alone: {best.speedup:.2f} times its speed {at} ({numbers}). "
            f"Drafting one token costs {speed.draft_cost_ratio:.2f} of a target step; with the check of the drafts "
            "that is more than the accepted tokens save here."
        )
    return f"{place} no difference to the target alone shows: {best.speedup:.2f} times its speed {at} ({numbers})."


def _quality_words(quality: TargetQuality | None) -> str:
    if quality is None:
        return "This drafter may change the output; that needs a check of quality, which this report does not hold."
    low, high = (bound - 1.0 for bound in quality.perplexity_ratio_interval)
    return (
        "This drafter changes the target, and acceptance and speed are those of the changed one. On the original's "
        f"answers (temperature {quality.temperature:g}) its perplexity is {quality.perplexity_ratio - 1:+.1%} against "
        f"the original's, 95 % interval {low:+.1%} to {high:+.1%}; of {quality.num_greedy} greedy answers "
        f"{quality.num_identical} stay the same."
    )


def _output_words(fidelity: Fidelity | None) -> str:
    if fidelity is None or fidelity.num_prompts == 0:
        return "That the output stays the target's own was not tested."
    same = f"{fidelity.num_identical} of {fidelity.num_prompts} greedy outputs ({fidelity.dtype}) are identical to it"
    if fidelity.passed:
        return f"The output stays the target's own: {same}."
    if fidelity.dtype != "float32" and all(d.near_tie for d in fidelity.divergences):
        return f"The output stays the target's own but for near-ties, which rounding decides: {same}."
    return f"The output is not the target's own: only {same}."


def summary_table(reports: dict[str, tuple[EvalReport, GateDecision | None]]) -> str:
    """Aligned plain text, one line per named report: acceptance, τ, gain of training, measured speed, verdict."""
    head = ["drafter", "accepted", "τ tokens/step (95 %)", "untrained", "gain", "best speed", "target alone", "verdict"]
    rows = [head, *(_row(name, report, decision) for name, (report, decision) in reports.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    return "\n".join([lines[0], "-" * sum([*widths, 2 * len(widths) - 2]), *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = [c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()


def _row(name: str, report: EvalReport, decision: GateDecision | None) -> list[str]:
    primary, gain, best = report.primary, gain_over_untrained(report), best_speed(report)
    length = accepted = "-"
    if primary is not None:
        low, high = primary.summary.mean_accepted_length_interval
        accepted = f"{primary.summary.acceptance_rate:.1%}"
        length = f"{primary.summary.mean_accepted_length:.2f} ({low:.2f}-{high:.2f})"
    speed = alone = "not measured"
    if report.speed is not None and best is not None:
        speed = f"{best.tokens_per_second:.1f} tok/s, {best.speedup:.2f}x at {drafted(best)}"
        alone = f"{report.speed.target_tokens_per_second:.1f} tok/s"
    return [
        name,
        accepted,
        length,
        f"{report.untrained.summary.mean_accepted_length:.2f}",
        "-" if gain is None else f"{gain[0]:+.1%}",
        speed,
        alone,
        "not judged" if decision is None else decision.verdict,
    ]
