"""Owns the pictures that hold drafters against each other: two in a comparison, any number in an overview."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdist.evaluation.chart import (
    GREY,
    Picture,
    distances,
    draw_baseline,
    draw_points,
    length_errors,
    numbers,
    rate_intervals,
)
from specdist.evaluation.compare import Comparison
from specdist.evaluation.overview import Judged
from specdist.evaluation.summary import best_speed, drafted
from specdist.schema import AcceptanceResult, EvalReport


def draw_comparison(comparison: Comparison) -> list[Picture]:
    """Differences of τ by domain, acceptance by position of both, τ against the draft length of both."""
    return [_differences(comparison), _both_by_position(comparison), _both_by_draft_length(comparison)]


def _differences(comparison: Comparison) -> Picture:
    rows = sorted(comparison.domains, key=lambda row: row.difference)
    overall = comparison.overall
    places = list(range(len(rows)))

    def draw(axes: Any) -> None:
        values = [row.difference for row in rows]
        errors = distances(values, [row.interval for row in rows])
        draw_points(axes, values, places, "domain", xerr=errors, linestyle="none")
        labels = [f"{row.name[:28]} ({row.num_prompts})" for row in rows]
        if overall is not None:
            errors = distances([overall.difference], [overall.interval])
            draw_points(axes, [overall.difference], [len(rows)], "all prompts", 1, xerr=errors, linestyle="none")
            labels.append(f"all ({overall.num_prompts})")
        axes.axvline(0.0, color=GREY, linestyle="--", linewidth=1.2, label="no difference", zorder=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel("τ of B less τ of A (tokens per target step)")
        axes.set_ylabel("domain (prompts)")

    said = ", ".join(f"{row.name} {row.difference:+.2f}" for row in rows)
    title = f"What B gains over A, {comparison.reports[0].primary_setting}"
    return Picture(title, f"Difference of τ by domain: {said}.", draw, height=2.2 + 0.36 * len(rows))


def _both_by_position(comparison: Comparison) -> Picture:
    results = zip("AB", map(_at_primary(comparison), comparison.reports), strict=True)
    return _position_curves({letter: result for letter, result in results if result is not None})


def _both_by_draft_length(comparison: Comparison) -> Picture:
    setting = comparison.reports[0].primary_setting
    curves = {
        letter: sorted((r for r in report.acceptance if r.setting == setting), key=lambda r: r.num_speculative_tokens)
        for letter, report in zip("AB", comparison.reports, strict=True)
    }
    return _length_curves(curves, setting)


def _position_curves(results: Mapping[str, AcceptanceResult]) -> Picture:
    """Acceptance by position of each named drafter."""

    def draw(axes: Any) -> None:
        for i, (label, result) in enumerate(results.items()):
            rates = result.summary.acceptance_at_position
            positions = [k + 1 + 0.06 * (i - (len(results) - 1) / 2) for k in range(len(rates))]
            draw_points(axes, positions, rates, label, i, yerr=distances(rates, rate_intervals(result)))
        axes.set_xticks(range(1, max(r.num_speculative_tokens for r in results.values()) + 1))
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("accepted (share of target steps)")

    said = "; ".join(f"{label} {numbers(r.summary.acceptance_at_position)}" for label, r in results.items())
    return Picture(
        "Acceptance by position", f"Share of target steps that accept position 1, 2 and so on: {said}.", draw
    )


def _length_curves(curves: Mapping[str, Sequence[AcceptanceResult]], setting: str) -> Picture:
    """τ against the draft length of each named drafter."""

    def draw(axes: Any) -> None:
        for i, (label, results) in enumerate(curves.items()):
            summaries = [r.summary for r in results]
            lengths = [summary.mean_accepted_length for summary in summaries]
            gammas = [r.num_speculative_tokens for r in results]
            draw_points(axes, gammas, lengths, label, i, yerr=length_errors(summaries))
        draw_baseline(axes.axhline)
        axes.set_xticks(sorted({r.num_speculative_tokens for results in curves.values() for r in results}))
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("τ (tokens per target step)")

    said = "; ".join(
        f"{label} {numbers([r.summary.mean_accepted_length for r in results])}" for label, results in curves.items()
    )
    return Picture("Tokens per target step against draft length", f"τ by draft length, {setting}: {said}.", draw)


def _at_primary(comparison: Comparison) -> Callable[[EvalReport], AcceptanceResult | None]:
    first = comparison.reports[0]
    return lambda report: report.result(first.primary_setting, first.num_speculative_tokens)


def draw_overview(drafters: Sequence[Judged]) -> list[Picture]:
    """Measured speed of each, τ against the draft length, acceptance by position, τ by domain."""
    drawers = (_speeds, _by_draft_length, _by_position, _by_domain)
    return [picture for draw in drawers if (picture := draw(drafters)) is not None]


def _speeds(drafters: Sequence[Judged]) -> Picture | None:
    timed = [(d, point) for d in drafters if (point := best_speed(d.report))]
    if not timed:
        return None
    rows = list(range(len(timed)))[::-1]  # the first on top
    values = [point.speedup for _, point in timed]
    sizes = {d.name: d.report.speed.batch_size for d, _ in timed if d.report.speed}
    shapes = [
        drafted(point) + (f", batch size {sizes[d.name]}" if len(set(sizes.values())) > 1 else "") for d, point in timed
    ]

    def draw(axes: Any) -> None:
        errors = distances(values, [point.speedup_interval for _, point in timed])
        draw_points(axes, values, rows, "fastest measured", xerr=errors, linestyle="none")
        draw_baseline(axes.axvline)
        axes.set_yticks(rows, [f"{d.name[-28:]}, {shape}" for (d, _), shape in zip(timed, shapes, strict=True)])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("speed (target alone = 1)")

    said = ", ".join(
        f"{d.name} {point.speedup:.2f} with {shape}" for (d, point), shape in zip(timed, shapes, strict=True)
    )
    return Picture("Measured speed", f"Speed over the target alone: {said}.", draw, height=1.9 + 0.36 * len(rows))


def _by_draft_length(drafters: Sequence[Judged]) -> Picture | None:
    curves = {
        d.name: sorted(
            (r for r in d.report.acceptance if r.setting == d.report.primary_setting),
            key=lambda r: r.num_speculative_tokens,
        )
        for d in drafters
    }
    if not any(curves.values()):
        return None
    return _length_curves(curves, "each at its primary setting")


def _by_position(drafters: Sequence[Judged]) -> Picture | None:
    results = {d.name: primary for d in drafters if (primary := d.report.primary)}
    return _position_curves(results) if results else None


def _by_domain(drafters: Sequence[Judged]) -> Picture | None:
    columns = {d.name: primary.domains for d in drafters if (primary := d.report.primary) and primary.domains}
    names = list(dict.fromkeys(name for domains in columns.values() for name in domains))[::-1]
    if not names:
        return None

    def draw(axes: Any) -> None:
        for i, (label, domains) in enumerate(columns.items()):
            shift = 0.12 * (i - (len(columns) - 1) / 2)  # side by side, so that error bars do not hide each other
            summaries = list(domains.values())
            lengths = [summary.mean_accepted_length for summary in summaries]
            places = [names.index(name) - shift for name in domains]
            draw_points(axes, lengths, places, label, i, xerr=length_errors(summaries), linestyle="none")
        draw_baseline(axes.axvline)
        axes.set_yticks(range(len(names)), [name[:28] for name in names])
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("τ (tokens per target step)")
        axes.set_ylabel("domain")

    said = "; ".join(
        f"{label}: {', '.join(f'{name} {s.mean_accepted_length:.2f}' for name, s in domains.items())}"
        for label, domains in columns.items()
    )
    return Picture("Acceptance by domain", f"τ by domain. {said}.", draw, height=2.2 + 0.4 * len(names))
