"""Owns the page of several drafters: a verdict in words, tables and pictures side by side, then each one's report."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from specdist.evaluation.overview import Judged, obstacle, recommendation
from specdist.evaluation.page import kind_name, report_parts, words_section
from specdist.evaluation.page_parts import bounds, bullets, document, figures, section, table
from specdist.evaluation.pictures_of_many import draw_overview
from specdist.evaluation.summary import best_speed, drafted, gain_over_untrained
from specdist.metrics import by_context
from specdist.schema import AcceptanceSummary

_SPEED_HEAD = [
    "drafter",
    "fastest with",
    "batch size",
    "speed",
    "95 % interval",
    "tokens per second",
    "alone",
    "draft cost",
    "gate",
]
_ACCEPTANCE_HEAD = ["drafter", "kind", "parameters", "γ", "τ", "95 % interval", "accepted", "gain of training"]


def render_overview(drafters: Sequence[Judged]) -> str:
    """The whole HTML document of two drafters or more."""
    title = "Which drafter to serve"
    targets = sorted({drafter.report.target.model_id for drafter in drafters})
    return document(
        title,
        [
            f"<h1>{title}</h1>",
            f'<p class="soft">{len(drafters)} drafters for {escape(", ".join(targets))}</p>',
            _verdict(drafters),
            section("Side by side", _speeds(drafters) + _acceptances(drafters)),
            figures(draw_overview(drafters)),
            *_tables_of_lengths(drafters),
            section("Each by itself", "".join(map(_own_report, drafters))),
            words_section(),
        ],
    )


def _verdict(drafters: Sequence[Judged]) -> str:
    first, *others = recommendation(drafters)
    kind = "reject" if obstacle(drafters) else "promote"
    return f'<div class="box {kind}"><strong>{escape(first)}</strong>{bullets(others) if others else ""}</div>'


def _speeds(drafters: Sequence[Judged]) -> str:
    rows = []
    for drafter in drafters:
        speed, best = drafter.report.speed, best_speed(drafter.report)
        cells = ["not timed", *"------"]
        if speed is not None and best is not None:
            rates = [f"{best.tokens_per_second:.1f}", f"{speed.target_tokens_per_second:.1f}"]
            ratio = [f"{best.speedup:.3f}", bounds(best.speedup_interval, 3)]
            cells = [drafted(best), str(speed.batch_size), *ratio, *rates, f"{speed.draft_cost_ratio:.3f}"]
        rows.append([drafter.name, *cells, drafter.verdict])
    note = '<p class="soft">Speed is over the target alone, timed beside it; draft cost in steps of the target.</p>'
    return table("Speed of each", _SPEED_HEAD, rows, text=(0, 1, 8)) + note


def _acceptances(drafters: Sequence[Judged]) -> str:
    rows = []
    for drafter in drafters:
        report, gain = drafter.report, gain_over_untrained(drafter.report)
        cells = ["-", "-", "-"]
        if report.primary is not None:
            s = report.primary.summary
            interval = bounds(s.mean_accepted_length_interval, 3)
            cells = [f"{s.mean_accepted_length:.3f}", interval, f"{s.acceptance_rate:.1%}"]
        what = [kind_name(report), f"{report.num_parameters / 1e6:,.1f} M", f"{report.num_speculative_tokens}"]
        rows.append([drafter.name, *what, *cells, "-" if gain is None else f"{gain[0]:+.1%}"])
    settings = ", ".join(sorted({drafter.report.primary_setting for drafter in drafters}))
    note = f'<p class="soft">Each at its own draft length γ; {escape(settings)} decoding.</p>'
    return table("Acceptance of each", _ACCEPTANCE_HEAD, rows, text=(0, 1)) + note


def _tables_of_lengths(drafters: Sequence[Judged]) -> list[str]:
    """τ of each drafter by setting, by domain and by context length, one column a drafter."""

    def settings(drafter: Judged) -> dict[str, AcceptanceSummary]:
        gamma = drafter.report.num_speculative_tokens
        return {r.setting: r.summary for r in drafter.report.acceptance if r.num_speculative_tokens == gamma}

    def domains(drafter: Judged) -> dict[str, AcceptanceSummary]:
        return drafter.report.primary.domains if drafter.report.primary else {}

    def contexts(drafter: Judged) -> dict[str, AcceptanceSummary]:
        return by_context(drafter.report.primary.prompts) if drafter.report.primary else {}

    kinds: Mapping[str, Callable[[Judged], dict[str, AcceptanceSummary]]] = {
        "setting": settings,
        "domain": domains,
        "tokens of the prompt": contexts,
    }
    return [part for what, of in kinds.items() if (part := _lengths(what, list(map(of, drafters)), drafters))]


def _lengths(what: str, columns: Sequence[dict[str, AcceptanceSummary]], drafters: Sequence[Judged]) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return ""
    rows = [[name, *(_length(column.get(name)) for column in columns)] for name in names]
    title = f"τ by {what}"
    return section(title, table(title, [what, *(d.name for d in drafters)], rows))


def _length(summary: AcceptanceSummary | None) -> str:
    if summary is None:
        return "-"
    return f"{summary.mean_accepted_length:.3f} ({bounds(summary.mean_accepted_length_interval)})"


def _own_report(drafter: Judged) -> str:
    parts = "".join(part for part in report_parts(drafter.report, drafter.decision) if part)
    return f"<details><summary>{escape(drafter.name)}: {escape(kind_name(drafter.report))}</summary>{parts}</details>"
