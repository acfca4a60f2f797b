"""Owns the pieces that pages of a report are made of: headings, tables, pictures. What is said stands elsewhere."""

import base64
from collections.abc import Sequence
from html import escape

from specdist.evaluation.pictures import Picture


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


def bounds(interval: Sequence[float], digits: int = 2) -> str:
    """An interval in words."""
    return " to ".join(f"{bound:.{digits}f}" for bound in interval)


def bullets(items: Sequence[str]) -> str:
    """A list, its items escaped."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
