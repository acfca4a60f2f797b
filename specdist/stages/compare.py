"""Owns `specdist compare`: finds the two reports, compares them, and writes the page."""

from pathlib import Path

from specdist import provenance
from specdist.evaluation.compare import compare_reports, comparison_lines
from specdist.evaluation.compare_page import render_comparison
from specdist.evaluation.report import REPORT_FILE, read_report
from specdist.registry.names import named_version
from specdist.schema import EvalReport


def find_report(name: str, root: Path) -> EvalReport:
    """The report that `name` means: a file, a directory that holds one (a run, a version), or a registry's MODEL[@N].

    MODEL alone is its champion. Raises ArtifactError where there is none.
    """
    path = Path(name)
    if path.is_file():
        return EvalReport.from_json(provenance.read_json(path), name)
    if path.is_dir():
        return read_report(path)
    return read_report(named_version(name, root, REPORT_FILE))


def _shown(name: str) -> str:
    """The end of a path, which tells runs apart and says nothing of the machine; other names as given."""
    path = Path(name)
    if not path.exists():
        return name
    parts = path.resolve().parts[1:]
    return "/".join(parts[-3:-1] if parts[-1] == REPORT_FILE else parts[-2:])


def compare(first: str, second: str, page: Path, root: Path) -> list[str]:
    """Write the page that compares the second drafter with the first; returns the same as lines of text."""
    reports = find_report(first, root), find_report(second, root)
    comparison = compare_reports(*reports, (_shown(first), _shown(second)))
    provenance.write_text(page, render_comparison(comparison))
    return [*comparison_lines(comparison), "", f"page: {page}"]
