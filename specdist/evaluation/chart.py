"""Owns how pictures of reports look: SVG or PNG, drawn by matplotlib, with a text that says the same in words.

Backgrounds are transparent and the colours are of the Okabe-Ito palette, so that a page may show them light or dark.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdist.metrics import bootstrap_lengths, interval
from specdist.schema import AcceptanceResult, AcceptanceSummary

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#777777"
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
    """A picture with its title and a description in words."""

    title: str
    description: str
    draw: Callable[[Any], None]
    height: float = 3.8

    @property
    def svg(self) -> bytes:
        """For a page: transparent, and the same file for the same report."""
        return self._saved("svg", transparent=True, metadata={"Date": None, "Creator": None})

    @property
    def png(self) -> bytes:
        """For places that show no SVG: on white, 1,040 pixels wide."""
        return self._saved("png", dpi=200)

    def _saved(self, kind: str, **options: Any) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(5.2, self.height), layout="constrained")  # inches
            axes = figure.add_subplot()
            figure.suptitle(self.title, x=0.02, horizontalalignment="left")  # the figure is wider than its axes
            self.draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            ours = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0] in ("untrained", "target alone"))
            figure.legend(
                [handle for _, handle in ours],
                [label for label, _ in ours],
                loc="outside lower center",
                ncols=len(ours) if len(ours) <= 3 else 2,
            )
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def distances(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Lengths of the error bars below and above; a percentile interval may lie beside its value."""
    low = [max(0.0, value - bounds[0]) for value, bounds in zip(values, intervals, strict=True)]
    high = [max(0.0, bounds[1] - value) for value, bounds in zip(values, intervals, strict=True)]
    return [low, high]


def draw_points(axes: Any, x: Sequence[float], y: Sequence[float], label: str, i: int = 0, **more: Any) -> None:
    """Filled markers of the `i`-th colour with error bars."""
    style = {
        "color": COLOURS[i % len(COLOURS)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "linewidth": 1.6,
        "markersize": 5,
    }
    axes.errorbar(x, y, capsize=3, label=label, **style, **more)


def draw_reference(axes: Any, x: Sequence[float], y: Sequence[float], label: str, **more: Any) -> None:
    """Hollow grey markers with error bars: something to compare with."""
    style = {"color": GREY, "marker": "o", "markerfacecolor": "none", "markersize": 6, "linestyle": ":"}
    axes.errorbar(x, y, capsize=3, label=label, **{**style, **more})


def draw_baseline(draw_line: Callable[..., Any]) -> None:
    """A line at 1, where the target alone is."""
    draw_line(1.0, color=GREY, linestyle="--", linewidth=1.2, label="target alone", zorder=1)


def length_errors(summaries: Sequence[AcceptanceSummary]) -> list[list[float]]:
    intervals = [summary.mean_accepted_length_interval for summary in summaries]
    return distances([summary.mean_accepted_length for summary in summaries], intervals)


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def rate_intervals(result: AcceptanceResult) -> list[list[float]]:
    """Interval of P(position accepted): that of τ − 1 of counters which hold one position only."""
    intervals = []
    for i in range(len(result.summary.acceptance_at_position)):
        only = [replace(p, accepted_at_position=[p.accepted_at_position[i]]) for p in result.prompts]
        intervals.append([bound - 1.0 for bound in interval(bootstrap_lengths(only, draws=1_000))])
    return intervals
