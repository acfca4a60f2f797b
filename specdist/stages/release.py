"""Owns the end of the chain: gate, registry, and what to paste into the engine."""

import logging
import shlex
from pathlib import Path

from specdist import provenance
from specdist.demo import DEMO_NAME
from specdist.errors import ArtifactError, StaleBaseline
from specdist.evaluation.report import read_report
from specdist.export.medusa import CHANGED_TARGET
from specdist.export.record import read_record
from specdist.gate import decide, exit_code, format_decision
from specdist.redaction import without_credentials
from specdist.registry.attempts import count_attempt
from specdist.registry.mirror import mirror_uri, tell
from specdist.registry.version import Version
from specdist.schema import DatasetManifest, EvalReport, GateDecision, TargetIdentity
from specdist.stages.evidence import GATE_FILE, evidence, write_evidence
from specdist.stages.run import Run
from specdist.stages.sync import note_release

logger = logging.getLogger(__name__)

_MIRROR_SECONDS = 60.0


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
    logger.info("champion: %s", path)
    named = run.config.target.target_model
    model = str(run.target.path) if named == DEMO_NAME or Path(named).is_dir() else named
    command = record.vllm_command(model if record.lossless else "TARGET", str(path))
    if command is None:
        ours = ["specdist", "decode", "--target", model, "--drafter", str(path), "PROMPT"]
        logger.info("no engine serves these heads; our own decoder does: %s", shlex.join(ours))
        return
    logger.info("vLLM: %s", command)
    if not record.lossless:
        logger.info("TARGET: %s", CHANGED_TARGET)


def _served_before(run: Run, report: EvalReport) -> str | None:
    """The version of this drafter that has been champion, if there is one."""
    champions = {entry["version"] for entry in run.registry.history()}
    for version in run.registry.versions():
        if version.number in champions and version.tags.get("drafter_sha256") == report.drafter_sha256:
            return version.number
    return None


def export_faults(export: Path, target: TargetIdentity, report: EvalReport) -> list[str]:
    """What is wrong with the files that would serve: damaged, not those that were measured, or not for `target`."""
    try:
        record = read_record(export)
    except ArtifactError as error:
        return [str(error)]
    faults = []
    if record.drafter_sha256 != report.drafter_sha256:
        faults.append(f"{export}: not the drafter that was measured ({report.drafter_sha256[:12]}); evaluate it again")
    if others := record.target.differences(target) or report.target.differences(target):
        faults.append(
            f"{export}: made for {record.target.model_id}, which is not the run's target: other {', '.join(others)}; "
            "train again"
        )
    return faults


def _champion_report(version: Version | None) -> tuple[EvalReport | None, str]:
    """The champion's report, or None and why it cannot be read."""
    try:
        return (read_report(version.path) if version else None), ""
    except ArtifactError as error:
        return None, str(error)


def _judge(run: Run, report: EvalReport, data: DatasetManifest | None, attempts: int) -> GateDecision:
    champion = run.registry.champion()
    champion_report, fault = _champion_report(champion)
    decision = decide(
        report,
        champion_report,
        run.policy,
        report_sha256=provenance.sha256_file(run.directory / "report.json"),
        champion_version=champion.number if champion else None,
        champion_fault=fault,
        export_faults=export_faults(run.export, run.target.identity, report),
        attempts=attempts,
    )
    write_evidence(run, report, decision, data)
    return decision


def _judge_and_publish(run: Run, report: EvalReport, data: DatasetManifest | None) -> tuple[GateDecision, str | None]:
    """The verdict and, where it is to promote, the number of the version that was published.

    One that is held becomes challenger. Where another champion came to serve in between, the drafter is judged again,
    against that one.
    """
    attempts = count_attempt(
        run.registry, eval_prompts_sha256=report.eval_prompts_sha256, drafter_sha256=report.drafter_sha256
    )
    while True:
        decision = _judge(run, report, data, attempts)
        logger.info("gate\n%s", format_decision(decision))
        files, tags, expected = evidence(run.directory), _tags(run, report, decision), decision.champion_version
        if decision.verdict == "hold":
            name, number = run.config.release.model_name, run.registry.challenge(run.export, files=files, tags=tags)
            what = f"version {number} of {name} is challenger" if number else f"this is the champion of {name} itself"
            logger.info("registry: %s", what)
        if decision.verdict != "promote":
            return decision, None
        try:
            return decision, run.registry.publish(run.export, files=files, tags=tags, expected_champion=expected)
        except StaleBaseline as error:
            logger.warning("%s; judging against that one", error)


def _tell_mlflow(run: Run) -> None:
    """Tell the MLflow that the run or the environment names, if any, what the registry holds. Waits a minute."""
    if (uri := mirror_uri(run.config.release.mlflow_tracking_uri)) is None:
        return
    if fault := tell(run.registry, uri, seconds=_MIRROR_SECONDS):
        again = f"specdist registry reconcile {run.registry.model_name} --root {run.registry.root}"
        warning = f"MLflow at {uri} was not told: {fault}; `{again} --mlflow-tracking-uri {uri}` does it"
        logger.warning("%s", without_credentials(warning))


def release(run: Run, report: EvalReport, data: DatasetManifest | None = None) -> int:
    """Judge the report, publish the export if it passes, and give the exit status: 0 only for a promoted drafter.

    A drafter that has been champion keeps its verdict and is not published again, whatever serves now. `data`: the
    dataset that it learned from.
    """
    if not run.is_main:
        return 0
    run.registry.reconcile()  # a run that was killed after its commit point has left history and link behind
    number = _served_before(run, report)
    decision = read_release(run.directory)[1] if number else None
    if decision is None:
        decision, number = _judge_and_publish(run, report, data)
    else:
        logger.info("gate\n%s", format_decision(decision))
    _tell_mlflow(run)
    note_release(run, report, decision)
    if decision.verdict == "promote":
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
