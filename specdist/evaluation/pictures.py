"""Owns the pictures of a report: SVG, drawn by matplotlib, with a text that says the same to who cannot see them.

Backgrounds are transparent and the colours are of the Okabe-Ito palette, so that a page may show them light or dark.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdist.evaluation.compare import Comparison
from specdist.metrics import bootstrap_lengths, interval
from specdist.schema import AcceptanceResult, AcceptanceSummary, EvalReport
from specdist.schema_heads import DraftShape, HeadsReport

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D")
_GREY = "#777777"
_STYLE: Any = {  # matplotlib types its keys one by one
    "font.size": 11,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#bbbbbb",
    "grid.linewidth": 0.6,
    "grid.alpha": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "svg.hashsalt": "specdist",  # equal reports give equal files
}


@dataclass(frozen=True)
class Picture:
    """An SVG with its title and a description in words."""

    title: str
    description: str
    svg: bytes


def draw_pictures(report: EvalReport) -> list[Picture]:
    """Draw what the report holds; a picture without numbers is left out."""
    drawers = (_by_position, _by_draft_length, _by_speed, _by_batch_size, _by_checkpoint, _by_domain)
    return [picture for draw in drawers if (picture := draw(report)) is not None]


def _picture(title: str, description: str, draw: Callable[[Any], None], height: float = 3.8) -> Picture:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, height), layout="constrained")  # inches
        axes = figure.add_subplot()
        figure.suptitle(title, x=0.02, horizontalalignment="left")  # the figure is wider than its axes
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        ours = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0] in ("untrained", "target alone"))
        figure.legend(
            [handle for _, handle in ours],
            [label for label, _ in ours],
            loc="outside lower center",
            ncols=len(ours) if len(ours) <= 3 else 2,
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture(title, description, buffer.getvalue())


def _distances(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Lengths of the error bars below and above; a percentile interval may lie beside its value."""
    low = [max(0.0, value - bounds[0]) for value, bounds in zip(values, intervals, strict=True)]
    high = [max(0.0, bounds[1] - value) for value, bounds in zip(values, intervals, strict=True)]
    return [low, high]


def _points(axes: Any, x: Sequence[float], y: Sequence[float], label: str, i: int = 0, **more: Any) -> None:
    """Filled markers of the `i`-th colour with error bars."""
    style = {"color": _COLOURS[i % 4], "marker": _MARKERS[i % 4], "linewidth": 1.6, "markersize": 5}
    axes.errorbar(x, y, capsize=3, label=label, **style, **more)


def _reference(axes: Any, x: Sequence[float], y: Sequence[float], label: str, **more: Any) -> None:
    """Hollow grey markers with error bars: something to compare with."""
    style = {"color": _GREY, "marker": "o", "markerfacecolor": "none", "markersize": 6, "linestyle": ":"}
    axes.errorbar(x, y, capsize=3, label=label, **{**style, **more})


def _baseline(draw_line: Callable[..., Any]) -> None:
    """A line at 1, where the target alone is."""
    draw_line(1.0, color=_GREY, linestyle="--", linewidth=1.2, label="target alone", zorder=1)


def _length_errors(summaries: Sequence[AcceptanceSummary]) -> list[list[float]]:
    intervals = [summary.mean_accepted_length_interval for summary in summaries]
    return _distances([summary.mean_accepted_length for summary in summaries], intervals)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _rate_intervals(result: AcceptanceResult) -> list[list[float]]:
    """Interval of P(position accepted): that of τ − 1 of counters which hold one position only."""
    intervals = []
    for i in range(len(result.summary.acceptance_at_position)):
        only = [replace(p, accepted_at_position=[p.accepted_at_position[i]]) for p in result.prompts]
        intervals.append([bound - 1.0 for bound in interval(bootstrap_lengths(only, draws=1_000))])
    return intervals


def _by_position(report: EvalReport) -> Picture | None:
    results = [r for r in report.acceptance if r.num_speculative_tokens == report.num_speculative_tokens]
    if not results:
        return None
    labelled = [*((r.setting, r) for r in results), ("untrained", report.untrained)]
    top = max(rate for _, r in labelled for rate in r.summary.acceptance_at_position)

    def draw(axes: Any) -> None:
        for i, (label, result) in enumerate(labelled):
            rates = result.summary.acceptance_at_position
            shift = 0.06 * (i - (len(labelled) - 1) / 2)  # side by side, so that error bars do not hide each other
            positions = [k + 1 + shift for k in range(len(rates))]
            errors = _distances(rates, _rate_intervals(result))
            if result is report.untrained:
                _reference(axes, positions, rates, label, yerr=errors)
            else:
                _points(axes, positions, rates, label, i, yerr=errors)
        axes.set_xticks(range(1, report.num_speculative_tokens + 1))
        axes.set_ylim(-0.03 * max(top, 0.1), min(1.05, 1.25 * max(top, 0.1)))
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("accepted (share of target steps)")

    said = "; ".join(f"{label} {_numbers(r.summary.acceptance_at_position)}" for label, r in labelled)
    title = f"Acceptance by position, draft length γ = {report.num_speculative_tokens}"
    return _picture(title, f"Share of target steps that accept position 1, 2 and so on: {said}.", draw)


def _by_draft_length(report: EvalReport) -> Picture | None:
    groups: dict[str, list[AcceptanceResult]] = {}
    for result in sorted(report.acceptance, key=lambda r: r.num_speculative_tokens):
        groups.setdefault(result.setting, []).append(result)
    if not groups:
        return None
    lengths = sorted({r.num_speculative_tokens for r in report.acceptance})

    def draw(axes: Any) -> None:
        for i, (setting, results) in enumerate(groups.items()):
            x, summaries = [r.num_speculative_tokens for r in results], [r.summary for r in results]
            values = [summary.mean_accepted_length for summary in summaries]
            _points(axes, x, values, setting, i, yerr=_length_errors(summaries))
        x, base = [report.untrained.num_speculative_tokens], report.untrained.summary
        _reference(axes, x, [base.mean_accepted_length], "untrained", yerr=_length_errors([base]), linestyle="none")
        _baseline(axes.axhline)
        axes.set_xticks(lengths)
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("τ (tokens per target step)")

    said = "; ".join(
        f"{setting} {_numbers([r.summary.mean_accepted_length for r in results])}"
        for setting, results in groups.items()
    )
    description = f"τ at draft length {', '.join(map(str, lengths))}: {said}. The target alone makes 1."
    return _picture("Tokens per target step against draft length", description, draw)


def _by_speed(report: EvalReport) -> Picture | None:
    chains = [p for p in report.speed.points if p.num_tree_nodes is None] if report.speed else []
    if not chains:
        return None
    points = sorted(chains, key=lambda p: p.num_speculative_tokens)
    lengths, speedups = [p.num_speculative_tokens for p in points], [p.speedup for p in points]

    def draw(axes: Any) -> None:
        _points(axes, lengths, speedups, "measured", yerr=_distances(speedups, [p.speedup_interval for p in points]))
        _reference(axes, lengths, [p.predicted_speedup for p in points], "predicted")
        _baseline(axes.axhline)
        axes.set_xticks(lengths)
        axes.margins(y=0.1)
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("speed (target alone = 1)")

    description = f"Speed over the target alone at draft length {', '.join(map(str, lengths))}: {_numbers(speedups)}."
    return _picture("Measured speed", description, draw)


def _by_batch_size(report: EvalReport) -> Picture | None:
    """Speed of the chain that the gate judges, at each batch size that was timed."""
    points = {
        speed.batch_size: point
        for speed in report.speeds
        for point in speed.points
        if point.num_tree_nodes is None and point.num_speculative_tokens == report.num_speculative_tokens
    }
    if len(points) < 2:
        return None
    sizes, speedups = list(points), [point.speedup for point in points.values()]

    def draw(axes: Any) -> None:
        places = range(len(sizes))  # sizes grow by factors: evenly spaced they can be read
        distances = _distances(speedups, [point.speedup_interval for point in points.values()])
        _points(axes, places, speedups, "measured", yerr=distances)
        _baseline(axes.axhline)
        axes.set_xticks(places, list(map(str, sizes)))
        axes.margins(y=0.1)
        axes.set_xlabel("batch size (texts decoded at once)")
        axes.set_ylabel("speed (target alone = 1)")

    description = (
        f"Speed over the target alone at γ = {report.num_speculative_tokens} and batch size "
        f"{', '.join(map(str, sizes))}: {_numbers(speedups)}."
    )
    return _picture("Measured speed against batch size", description, draw)


def _by_checkpoint(report: EvalReport) -> Picture | None:
    if len(report.checkpoints) < 2:
        return None
    points = sorted(report.checkpoints, key=lambda p: p.step)
    steps, values = [p.step for p in points], [p.summary.mean_accepted_length for p in points]

    def draw(axes: Any) -> None:
        _points(axes, steps, values, "checkpoint", yerr=_length_errors([p.summary for p in points]))
        if report.checkpoint_step in steps:
            y, ring = values[steps.index(report.checkpoint_step)], {"markersize": 12, "markerfacecolor": "none"}
            axes.plot([report.checkpoint_step], [y], "o", color=_COLOURS[1], label="this drafter", **ring)
        _baseline(axes.axhline)
        axes.set_xlabel("training step (0 = untrained)")
        axes.set_ylabel("τ (tokens per target step)")

    said = ", ".join(f"{value:.2f} at step {step}" for step, value in zip(steps, values, strict=True))
    return _picture("Acceptance by checkpoint", f"τ over training: {said}.", draw)


def _by_domain(report: EvalReport) -> Picture | None:
    primary = report.primary
    if primary is None or not primary.domains:
        return None
    domains = sorted(primary.domains.items(), key=lambda item: item[1].mean_accepted_length)
    summaries, rows = [summary for _, summary in domains], list(range(len(domains)))
    values = [summary.mean_accepted_length for summary in summaries]
    before = {i: s for i, (name, _) in enumerate(domains) if (s := report.untrained.domains.get(name))}

    def draw(axes: Any) -> None:
        _points(axes, values, rows, "this drafter", xerr=_length_errors(summaries), linestyle="none")
        errors = _length_errors(list(before.values()))
        x = [summary.mean_accepted_length for summary in before.values()]
        _reference(axes, x, list(before), "untrained", xerr=errors, linestyle="none")
        _baseline(axes.axvline)
        axes.set_yticks(rows, [f"{name[:28]} ({summary.num_prompts})" for name, summary in domains])
        axes.set_ylim(-0.6, len(domains) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("τ (tokens per target step)")
        axes.set_ylabel("domain (prompts)")

    said = ", ".join(f"{name} {value:.2f}" for (name, _), value in zip(domains, values, strict=True))
    title = f"Acceptance by domain, {primary.setting}"
    return _picture(title, f"τ by domain: {said}.", draw, height=1.9 + 0.36 * len(domains))


def draw_shapes(heads: HeadsReport) -> Picture:
    """τ of chains and trees against the number of drafted tokens that the target verifies."""

    def draw(axes: Any) -> None:
        for i, kind in enumerate(("tree", "chain")):
            shapes = [shape for shape in heads.shapes if shape.kind == kind]
            values = [shape.mean_accepted_length for shape in shapes]
            errors = _distances(values, [shape.mean_accepted_length_interval for shape in shapes])
            _points(axes, [shape.num_nodes for shape in shapes], values, kind, i, yerr=errors)
        _baseline(axes.axhline)
        sizes = sorted({shape.num_nodes for shape in heads.shapes if shape.kind == "tree"})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_xlabel("drafted tokens per step (nodes)")
        axes.set_ylabel("τ (tokens per target step)")

    def said(shape: DraftShape) -> str:
        return f"{shape.kind} of {shape.num_nodes} {shape.mean_accepted_length:.2f}"

    description = f"τ by drafted tokens: {', '.join(map(said, heads.shapes))}. The target alone makes 1."
    return _picture("Tokens per target step of chains and trees", description, draw)


def draw_comparison(comparison: Comparison) -> list[Picture]:
    """Differences of τ by domain, acceptance by position of both, τ against the draft length of both."""
    return [_differences(comparison), _both_by_position(comparison), _both_by_draft_length(comparison)]


def _differences(comparison: Comparison) -> Picture:
    rows = sorted(comparison.domains, key=lambda row: row.difference)
    overall = comparison.overall
    places = list(range(len(rows)))

    def draw(axes: Any) -> None:
        values = [row.difference for row in rows]
        errors = _distances(values, [row.interval for row in rows])
        _points(axes, values, places, "domain", xerr=errors, linestyle="none")
        labels = [f"{row.name[:28]} ({row.num_prompts})" for row in rows]
        if overall is not None:
            errors = _distances([overall.difference], [overall.interval])
            _points(axes, [overall.difference], [len(rows)], "all prompts", 1, xerr=errors, linestyle="none")
            labels.append(f"all ({overall.num_prompts})")
        axes.axvline(0.0, color=_GREY, linestyle="--", linewidth=1.2, label="no difference", zorder=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel("τ of B less τ of A (tokens per target step)")
        axes.set_ylabel("domain (prompts)")

    said = ", ".join(f"{row.name} {row.difference:+.2f}" for row in rows)
    title = f"What B gains over A, {comparison.reports[0].primary_setting}"
    return _picture(title, f"Difference of τ by domain: {said}.", draw, height=2.2 + 0.36 * len(rows))


def _both_by_position(comparison: Comparison) -> Picture:
    results = [r for r in map(_at_primary(comparison), comparison.reports) if r is not None]

    def draw(axes: Any) -> None:
        for i, (letter, result) in enumerate(zip("AB", results, strict=True)):
            rates = result.summary.acceptance_at_position
            positions = [k + 1 + 0.06 * (i - 0.5) for k in range(len(rates))]
            _points(axes, positions, rates, letter, i, yerr=_distances(rates, _rate_intervals(result)))
        axes.set_xticks(range(1, results[0].num_speculative_tokens + 1))
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("accepted (share of target steps)")

    said = "; ".join(
        f"{letter} {_numbers(r.summary.acceptance_at_position)}" for letter, r in zip("AB", results, strict=True)
    )
    return _picture(
        "Acceptance by position", f"Share of target steps that accept position 1, 2 and so on: {said}.", draw
    )


def _both_by_draft_length(comparison: Comparison) -> Picture:
    setting = comparison.reports[0].primary_setting
    curves = [
        sorted((r for r in report.acceptance if r.setting == setting), key=lambda r: r.num_speculative_tokens)
        for report in comparison.reports
    ]

    def draw(axes: Any) -> None:
        for i, (letter, results) in enumerate(zip("AB", curves, strict=True)):
            summaries = [r.summary for r in results]
            lengths = [summary.mean_accepted_length for summary in summaries]
            gammas = [r.num_speculative_tokens for r in results]
            _points(axes, gammas, lengths, letter, i, yerr=_length_errors(summaries))
        _baseline(axes.axhline)
        axes.set_xticks(sorted({r.num_speculative_tokens for results in curves for r in results}))
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("τ (tokens per target step)")

    said = "; ".join(
        f"{letter} {_numbers([r.summary.mean_accepted_length for r in results])}"
        for letter, results in zip("AB", curves, strict=True)
    )
    return _picture("Tokens per target step against draft length", f"τ by draft length, {setting}: {said}.", draw)


def _at_primary(comparison: Comparison) -> Callable[[EvalReport], AcceptanceResult | None]:
    first = comparison.reports[0]
    return lambda report: report.result(first.primary_setting, first.num_speculative_tokens)
