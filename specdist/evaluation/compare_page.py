"""Owns the page of a comparison of two drafters."""

from html import escape

from specdist.evaluation.compare import Comparison, difference_cells
from specdist.evaluation.page_parts import bounds, bullets, document, figures, section, table
from specdist.evaluation.pictures_of_many import draw_comparison
from specdist.evaluation.summary import best_speed, drafted
from specdist.schema import EvalReport

_HEAD = ["prompts", "A", "B", "B − A", "95 % interval", "B / A", "p", "B has"]
_NOTE = (
    "Differences are B less A on the same prompts, resampled together, so what prompts have in common cancels. "
    "An interval that does not hold 0 is a difference that chance hardly makes. p is two-sided, by swapping the two "
    "drafters prompt by prompt. τ is tokens per step of the target; the target alone has 1."
)


def render_comparison(comparison: Comparison) -> str:
    """The whole HTML document."""
    first, second = comparison.names
    title = f"{second} compared with {first}"
    parts = [f"<h1>{escape(title)}</h1>", _drafters(comparison)]
    if comparison.objections:
        parts.append(f'<div class="box reject"><strong>Not comparable</strong>{bullets(comparison.objections)}</div>')
        return document(title, [*parts, section("Measured speed, each by itself", _speeds(comparison))])
    last = len(_HEAD)
    gamma, setting = comparison.reports[0].num_speculative_tokens, comparison.reports[0].primary_setting
    sections = [
        (f"τ over all prompts, γ = {gamma}", "setting", comparison.settings),
        (f"τ by domain, {setting}", "domain", comparison.domains),
        (f"Acceptance by position, {setting}", "position", comparison.positions),
    ]
    return document(
        title,
        [
            *parts,
            f'<p class="lead">{escape(_finding(comparison))}</p>',
            figures(draw_comparison(comparison)),
            *(
                section(name, table(name, [what, *_HEAD], [difference_cells(row) for row in rows], text=(0, last)))
                for name, what, rows in sections
            ),
            f'<p class="soft">{escape(f"{_NOTE} {comparison.remark}")}</p>',
            section("Measured speed, each by itself", _speeds(comparison)),
        ],
    )


def _finding(comparison: Comparison) -> str:
    row, gamma = comparison.overall, comparison.reports[0].num_speculative_tokens
    if row is None:
        return "The two were not measured at a common setting."
    low, high = row.interval
    worse = [domain.name for domain in comparison.domains if domain.interval[1] < 0]
    better = [domain.name for domain in comparison.domains if domain.interval[0] > 0]
    words = {
        "more": f"B gives more tokens per step of the target than A: {row.difference:+.3f}",
        "less": f"B gives fewer tokens per step of the target than A: {row.difference:+.3f}",
    }.get(row.words, f"No difference that chance could not make: B has {row.difference:+.3f} tokens per step")
    shown = (
        f"It is shown to be better in {len(better)} of {len(comparison.domains)} domains and worse in "
        f"{len(worse) or 'none'}"
    )
    return (
        f"{words} ({low:+.3f} to {high:+.3f}), {row.ratio - 1:+.1%}, at {row.name}, γ = {gamma}, on {row.num_prompts} "
        f"prompts. {shown}{': ' + ', '.join(worse) if worse else ''}."
    )


def _drafters(comparison: Comparison) -> str:
    head = ["", "drafter", "kind", "parameters", "training answers", "step", "served γ"]
    rows = [
        [
            letter,
            name,
            report.drafter_kind,
            f"{report.num_parameters / 1e6:,.1f} M",
            f"{report.num_training_rows:,}",
            f"{report.checkpoint_step:,}",
            str(report.num_speculative_tokens),
        ]
        for letter, name, report in zip("AB", comparison.names, comparison.reports, strict=True)
    ]
    return table("The two drafters", head, rows, text=(0, 1, 2))


def _speeds(comparison: Comparison) -> str:
    rows = [
        _speed_row(letter, report)
        for letter, report in zip("AB", comparison.reports, strict=True)
        if best_speed(report) is not None
    ]
    if not rows:
        return "<p>Neither was timed.</p>"
    note = '<p class="soft">Timed apart, perhaps on other machines: compare each with its own target alone.</p>'
    return (
        table("Measured speed", ["", "fastest", "times the target alone", "95 % interval", "on"], rows, text=(0, 4))
        + note
    )


def _speed_row(letter: str, report: EvalReport) -> list[str]:
    best, speed = best_speed(report), report.speed
    if best is None or speed is None:
        return [letter, "-", "-", "-", "-"]
    place = f"{speed.hardware}, {speed.dtype}, batch size {speed.batch_size}"
    return [letter, drafted(best), f"{best.speedup:.3f}", bounds(best.speedup_interval, 3), place]
