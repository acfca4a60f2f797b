"""Owns the two files of an evaluation: `report.json`, which the gate reads, and `report.html`, which people read."""

import json
from pathlib import Path

from specdist.errors import ArtifactError
from specdist.evaluation.page import render_page
from specdist.evaluation.summary import summary_table
from specdist.provenance import read_json, write_json, write_text
from specdist.schema import EvalReport, GateDecision

__all__ = ["REPORT_FILE", "read_report", "summary_table", "write_report"]

REPORT_FILE = "report.json"


def write_report(report: EvalReport, directory: Path, decision: GateDecision | None = None) -> None:
    """Write `report.json` and a self-contained `report.html`, which shows `decision` where there is one.

    Raises ArtifactError, and writes nothing, where the report holds a number that is not finite.
    """
    plain = report.to_json()
    try:
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory}: the report holds a value that is no plain finite number ({error})"
        ) from error
    write_text(directory / "report.html", render_page(report, decision))
    write_json(directory / REPORT_FILE, plain)  # last: who finds it finds both


def read_report(directory: Path) -> EvalReport:
    """Read `report.json` below `directory`. Raises ArtifactError, naming the file, where it is missing or wrong."""
    path = directory / REPORT_FILE
    return EvalReport.from_json(read_json(path), str(path))
