"""Owns the comparison of two drafters on the same prompts: differences of τ with intervals, overall and in parts.

A difference is the second drafter's number less the first's, prompt by prompt: both sides are resampled together. Two
reports of other prompts, another target or another way to decode are not compared; what stands between them is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdist.consistency import (
    comparison_fault,
    count_faults,
    measured_at,
    non_finite_numbers,
    pairing_fault,
    prompts_by_id,
    texts_recorded,
)
from specdist.metrics import (
    bootstrap_length_differences,
    interval,
    permutation_p_value,
    pooled_length,
    resampled_sums,
)
from specdist.schema import AcceptanceResult, EvalReport, PromptCounts

Pair = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """One number of both drafters and what the second has more of it, with its 95 % interval and two-sided p-value."""

    name: str
    num_prompts: int
    values: Pair
    difference: float
    interval: list[float]
    p_value: float | None = None

    @property
    def ratio(self) -> float:
        """The second over the first."""
        return self.values[1] / self.values[0] if self.values[0] else float("nan")

    @property
    def words(self) -> str:
        """What the interval says."""
        if self.interval[0] > 0:
            return "more"
        return "less" if self.interval[1] < 0 else "no difference shown"


@dataclass(frozen=True)
class Comparison:
    """Two named reports. `objections` says why they cannot be compared; then there are no differences.

    `settings`: τ over all prompts at each decode setting; `domains`: τ in each domain at the first's primary setting;
    `positions`: acceptance at each position there. All at the first's draft length.
    """

    names: tuple[str, str]
    reports: tuple[EvalReport, EvalReport]
    objections: list[str]
    settings: list[Difference]
    domains: list[Difference]
    positions: list[Difference]

    @property
    def remark(self) -> str:
        """What is not known of the pair, though they are compared; empty where there is nothing to remark."""
        results = [report.primary for report in self.reports if report.primary]
        if self.objections or texts_recorded(*results):
            return ""
        return "An older report does not say how its texts were written: that both have the same is not checked."

    @property
    def overall(self) -> Difference | None:
        """τ over all prompts at the primary setting, None where the two cannot be compared."""
        return next((row for row in self.settings if row.name == self.reports[0].primary_setting), None)


def compare_reports(first: EvalReport, second: EvalReport, names: tuple[str, str]) -> Comparison:
    """Differences of the second drafter from the first. Raises ArtifactError on values of a wrong type."""
    objections = [*_own_faults(names[0], first), *_own_faults(names[1], second)] or _objections(first, second)
    settings: list[Difference] = []
    domains: list[Difference] = []
    positions: list[Difference] = []
    if not objections and (primary := first.primary) is not None:
        for ours in first.acceptance:
            theirs = second.result(ours.setting, ours.num_speculative_tokens)
            if (
                ours.num_speculative_tokens == first.num_speculative_tokens
                and theirs
                and not pairing_fault(ours, theirs)
            ):
                settings.append(_length_difference(ours.setting, *_paired(ours, theirs)))
        pair = _paired(primary, _same(second, primary))
        for domain in sorted(primary.domains):
            parts = [[p for p in side if p.domain == domain] for side in pair]
            domains.append(_length_difference(domain, *parts))
        positions = _position_differences(*pair)
    return Comparison(names, (first, second), objections, settings, domains, positions)


def _own_faults(name: str, report: EvalReport) -> list[str]:
    """What makes one report's numbers unbelievable."""
    if bad := non_finite_numbers(report):
        return [f"{name}: not finite at {bad[0]}"]
    faults = [*report.invalid_reasons, *count_faults(report)]
    return [f"{name}: {faults[0]}"] if faults else []


def _objections(first: EvalReport, second: EvalReport) -> list[str]:
    if first.target != second.target:
        return [f"other targets: {first.target.model_id} and {second.target.model_id}, or their hashes differ"]
    fault = comparison_fault(first, second)
    return [f"the second {fault}"] if fault else []


def _same(report: EvalReport, result: AcceptanceResult) -> AcceptanceResult:
    """The report's acceptance measured as `result` was; `_objections` has seen that there is one."""
    return next(r for r in report.acceptance if measured_at(r) == measured_at(result))


def _paired(ours: AcceptanceResult, theirs: AcceptanceResult) -> tuple[list[PromptCounts], list[PromptCounts]]:
    return list(prompts_by_id(ours).values()), list(prompts_by_id(theirs).values())


def _length_difference(name: str, first: Sequence[PromptCounts], second: Sequence[PromptCounts]) -> Difference:
    with np.errstate(all="ignore"):
        samples = bootstrap_length_differences(second, first)
        tails = permutation_p_value(second, first), permutation_p_value(first, second)
    bounds = interval(samples[np.isfinite(samples)])  # a resampling may hold no prompt that drafts
    values = pooled_length(first), pooled_length(second)
    return Difference(name, len(first), values, values[1] - values[0], bounds, min(1.0, 2.0 * min(tails)))


def _position_differences(first: Sequence[PromptCounts], second: Sequence[PromptCounts]) -> list[Difference]:
    """P(position accepted) of both, over verify steps, and the difference of resampled sums."""
    sides = [np.array([[p.num_drafts, *p.accepted_at_position] for p in side]) for side in (first, second)]
    rates = [side[:, 1:].sum(axis=0) / side[:, 0].sum() for side in sides]
    sums = resampled_sums(np.concatenate(sides, axis=1))  # [draws, 2 (1 + γ)]
    resampled = [half[:, 1:] / half[:, :1] for half in np.split(sums, 2, axis=1)]
    gains = resampled[1] - resampled[0]
    return [
        Difference(str(i + 1), len(first), (float(a), float(b)), float(b - a), interval(gains[:, i]))
        for i, (a, b) in enumerate(zip(*rates, strict=True))
    ]


def comparison_lines(comparison: Comparison) -> list[str]:
    """The comparison as an aligned table of plain text."""
    first, second = comparison.names
    lines = [f"A  {first}: {_facts(comparison.reports[0])}", f"B  {second}: {_facts(comparison.reports[1])}", ""]
    if comparison.objections:
        lines += [f"not comparable: {objection}" for objection in comparison.objections]
        return [*lines, "", *_table([["", "τ", "95 %"], *map(_alone, "AB", comparison.reports)])]
    lines += [comparison.remark, ""] if comparison.remark else []
    gamma = comparison.reports[0].num_speculative_tokens
    head = ["prompts", "A", "B", "B - A", "95 %", "B / A", "p", ""]
    lines += _table([[f"τ at γ={gamma}", *head], *map(difference_cells, comparison.settings)])
    lines += ["", *_table([["τ by domain", *head], *map(difference_cells, comparison.domains)])]
    return [*lines, "", *_table([["accepted at position", *head], *map(difference_cells, comparison.positions)])]


def difference_cells(row: Difference) -> list[str]:
    """A row of a table: name, prompts, both values, difference, interval, ratio, p-value, words."""
    low, high = row.interval
    return [
        row.name,
        str(row.num_prompts),
        *(f"{value:.3f}" for value in row.values),
        f"{row.difference:+.3f}",
        f"{low:+.3f} to {high:+.3f}",
        f"{row.ratio - 1:+.1%}" if np.isfinite(row.ratio) else "-",
        "-" if row.p_value is None else f"{row.p_value:.2g}",
        row.words,
    ]


def _facts(report: EvalReport) -> str:
    return (
        f"{report.drafter_kind}, {report.num_parameters / 1e6:,.1f} M parameters, step {report.checkpoint_step:,}, "
        f"trained on {report.num_training_rows:,} answers, serves γ={report.num_speculative_tokens}"
    )


def _alone(letter: str, report: EvalReport) -> list[str]:
    if report.primary is None:
        return [letter, "-", "-"]
    low, high = report.primary.summary.mean_accepted_length_interval
    return [letter, f"{report.primary.summary.mean_accepted_length:.3f}", f"{low:.3f} to {high:.3f}"]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
