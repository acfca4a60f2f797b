"""Owns the end of the chain: gate, registry, and what to paste into the engine."""

import json
import logging
from pathlib import Path

from specdist import provenance
from specdist.demo import DEMO_NAME
from specdist.evaluation.report import read_report, write_report
from specdist.export.medusa import CHANGED_TARGET
from specdist.export.record import read_record
from specdist.gate import decide, exit_code, format_decision
from specdist.schema import EvalReport, GateDecision
from specdist.stages.run import Run

logger = logging.getLogger(__name__)

GATE_FILE = "gate.json"


def _tags(run: Run, report: EvalReport, decision: GateDecision) -> dict[str, str]:
    primary = report.primary
    return {
        "drafter_kind": report.drafter_kind,
        "drafter_sha256": report.drafter_sha256,
        "target": report.target.model_id,
        "target_weights_sha256": report.target.weights_sha256,
        "mean_accepted_length": f"{primary.summary.mean_accepted_length:.4f}" if primary else "",
        "report_sha256": decision.report_sha256,
        "git_commit": provenance.git_commit() or "",
    }


def _log_serving(run: Run) -> None:
    path, record = run.registry.champion_path(), read_record(run.export)
    config = {**record.speculative_config, "model": str(path)}
    logger.info("champion: %s", path)
    if not record.lossless:
        logger.info("vLLM: with a target of its own, --speculative-config '%s'", json.dumps(config))
        logger.info("%s", CHANGED_TARGET)
        return
    named = run.config.target.target_model
    model = run.target.path if named == DEMO_NAME or Path(named).is_dir() else named
    logger.info("vLLM: vllm serve %s --speculative-config '%s'", model, json.dumps(config))


def _served_before(run: Run, report: EvalReport) -> str | None:
    """The version of this drafter that has been champion, if there is one."""
    champions = {entry["version"] for entry in run.registry.history()}
    for version in run.registry.versions():
        if version.number in champions and version.tags.get("drafter_sha256") == report.drafter_sha256:
            return version.number
    return None


def _judge(run: Run, report: EvalReport) -> GateDecision:
    champion = run.registry.champion()
    decision = decide(
        report,
        read_report(champion.path) if champion else None,
        run.policy,
        report_sha256=provenance.sha256_file(run.directory / "report.json"),
        champion_version=champion.number if champion else None,
    )
    provenance.write_json(run.directory / GATE_FILE, decision.to_json())
    write_report(report, run.directory, decision)
    return decision


def release(run: Run, report: EvalReport) -> int:
    """Judge the report, publish the export if it passes, and give the exit status: 0 only for a promoted drafter.

    A drafter that has been champion keeps its verdict and is not published again, whatever serves now. Raises
    ArtifactError where the champion changes between judgement and publishing: the next start judges anew.
    """
    if not run.is_main:
        return 0
    number = _served_before(run, report)
    decision = read_release(run.directory)[1] if number else None
    if decision is None:
        decision = _judge(run, report)
    logger.info("gate\n%s", format_decision(decision))
    if decision.verdict == "promote":
        if number is None:
            files = {name: run.directory / name for name in ("report.json", "report.html", GATE_FILE)}
            tags = _tags(run, report, decision)
            number = run.registry.publish(
                run.export, files=files, tags=tags, expected_champion=decision.champion_version
            )
        champion = run.registry.champion()
        serves = "serves as champion" if champion and champion.number == number else "was champion; another serves now"
        logger.info("registry: version %s of %s %s", number, run.config.release.model_name, serves)
        _log_serving(run)
    logger.info("report: %s", (run.directory / "report.html").absolute())
    return exit_code(decision)


def read_release(directory: Path) -> tuple[EvalReport, GateDecision | None]:
    """A finished run's report and verdict (None where it was not judged)."""
    gate_file = directory / GATE_FILE
    decision = GateDecision.from_json(provenance.read_json(gate_file), str(gate_file)) if gate_file.exists() else None
    return read_report(directory), decision
