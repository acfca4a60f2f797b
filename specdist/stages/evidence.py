"""Owns what lies beside an export once it is judged: report, page, verdict, the data learned from, the model card."""

from pathlib import Path

from specdist import provenance
from specdist.evaluation.card import CARD_FILE, model_card
from specdist.evaluation.report import REPORT_FILE, write_report
from specdist.export.record import read_record
from specdist.schema import DatasetManifest, EvalReport, GateDecision
from specdist.stages.run import Run

GATE_FILE, PAGE_FILE, DATASET_FILE = "gate.json", "report.html", "dataset.json"
_FILES = (REPORT_FILE, PAGE_FILE, GATE_FILE, DATASET_FILE, CARD_FILE)


def write_evidence(run: Run, report: EvalReport, decision: GateDecision, data: DatasetManifest | None) -> None:
    """Write it into the run's directory. What is rejected gets no card: its export may be damaged."""
    provenance.write_json(run.directory / GATE_FILE, decision.to_json())
    write_report(report, run.directory, decision)
    if data is not None:
        provenance.write_json(run.directory / DATASET_FILE, data.to_json())
    if decision.verdict == "reject":
        (run.directory / CARD_FILE).unlink(missing_ok=True)
        return
    release = run.config.release
    card = model_card(report, read_record(run.export), decision, data, name=release.model_name, licence=release.license)
    provenance.write_text(run.directory / CARD_FILE, card)


def evidence(directory: Path) -> dict[str, Path]:
    """The files of it that lie in `directory` (a run or a version), by name."""
    return {name: directory / name for name in _FILES if (directory / name).is_file()}
