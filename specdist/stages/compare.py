"""Owns `specdist compare`: compares two reports, and writes the page."""

from pathlib import Path

from specdist import provenance
from specdist.evaluation.compare import compare_reports, comparison_lines
from specdist.evaluation.compare_page import render_comparison
from specdist.stages.report import read_named


def compare(first: str, second: str, page: Path, root: Path) -> list[str]:
    """Write the page that compares the second drafter with the first; returns the same as lines of text."""
    one, other = read_named(first, root), read_named(second, root)
    comparison = compare_reports(one.report, other.report, (one.name, other.name))
    provenance.write_text(page, render_comparison(comparison))
    return [*comparison_lines(comparison), "", f"page: {page}"]
