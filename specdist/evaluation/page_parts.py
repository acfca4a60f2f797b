"""Owns the pieces that pages are made of: the document, headings, tables, pictures. What is said stands elsewhere.

A page is one file that needs nothing else, for wide and narrow screens, light and dark.
"""

import base64
from collections.abc import Sequence
from html import escape

from specdist.evaluation.chart import Picture

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #57606a; --line: #d8dee4;
  --card: #f6f8fa; --link: #0060a0; --promote: #1a7f37; --hold: #8a5a00; --reject: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --text: #e4e7eb; --soft: #9aa4af; --line: #333a42; --card: #1c2127; --link: #6cb6ff;
    --promote: #57c26e; --hold: #e0ad45; --reject: #ff8276; }
  figure img { filter: invert(0.9) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 1rem; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
p.lead { max-width: none; font-size: 1.05rem; }
ul { margin: .4rem 0; padding-left: 1.3rem; }
.soft, footer { color: var(--soft); font-size: .9rem; }
.box { border: 1px solid var(--line); border-left: .35rem solid var(--soft); border-radius: .4rem;
  background: var(--card); padding: .75rem 1rem; margin: 1.1rem 0; }
.box strong { letter-spacing: .02em; }
.promote { border-left-color: var(--promote); } .promote > strong { color: var(--promote); }
.hold { border-left-color: var(--hold); } .hold > strong { color: var(--hold); }
.reject { border-left-color: var(--reject); } .reject > strong { color: var(--reject); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .85rem; color: var(--soft); }
.pictures { columns: 2; column-gap: 1rem; }
figure { margin: 0 0 1rem; padding: .6rem; border: 1px solid var(--line); border-radius: .4rem; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th.t, td.t { text-align: left; } td.w { white-space: normal; min-width: 16rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--back); }
.box th:first-child, .box td:first-child { background: var(--card); }
tr.main td, tr.main td:first-child { font-weight: 650; background: var(--card); }
dt { font-weight: 650; margin-top: .6rem; } dd { margin: 0 0 0 1rem; max-width: 46rem; }
summary { cursor: pointer; color: var(--link); margin-top: .4rem; }
footer { margin-top: 2.5rem; overflow-wrap: anywhere; }
@media (max-width: 52rem) { .pictures { columns: 1; } main { padding: 1rem .9rem 2rem; }
  h1 { font-size: 1.4rem; } th, td { padding: .35rem .5rem; } }
@media print { .pictures { columns: 2; } .scroll { overflow: visible; } }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """A whole HTML document of the parts that are not empty, which are HTML; `title` is plain text."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the browser may fetch nothing
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, content: str) -> str:
    """A part of the page under a heading; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def table(
    label: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,), main: int = -1
) -> str:
    """A table whose columns `text` are left-aligned and whose row `main` stands out. All cells are escaped."""

    def cell(tag: str, i: int, value: str) -> str:
        kind = ("t w" if len(value) > 36 else "t") if i in text else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} class="{kind}">{escape(value)}</{tag}>'

    body = "".join(
        f'<tr class="main">{cells}</tr>' if r == main else f"<tr>{cells}</tr>"
        for r, row in enumerate(rows)
        if (cells := "".join(cell("td", i, value) for i, value in enumerate(row)))
    )
    header = "".join(cell("th", i, value) for i, value in enumerate(head))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(picture: Picture) -> str:
    """The picture inside the page, its words as alternative text."""
    data = base64.b64encode(picture.svg).decode("ascii")
    alt = escape(f"{picture.title}. {picture.description}")
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{alt}"></figure>'


def figures(pictures: Sequence[Picture]) -> str:
    """Pictures side by side, or below each other where there is no room."""
    return f'<div class="pictures">{"".join(map(figure, pictures))}</div>'


def bounds(interval: Sequence[float], digits: int = 2) -> str:
    """An interval in words; "-" where it has no width, as over a single prompt, which is no certainty."""
    if len(set(interval)) == 1:
        return "-"
    return " to ".join(f"{bound:.{digits}f}" for bound in interval)


def bullets(items: Sequence[str]) -> str:
    """A list, its items escaped."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
