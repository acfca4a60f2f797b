"""Owns `specdist sync`: what a judged drafter leaves for W&B goes into the outbox, and from there to the server.

Sending is apart from runs: a run only writes a small file, and what cannot be sent waits for the next `specdist sync`.
"""

import json
import logging
import os
from pathlib import Path

from filelock import FileLock, Timeout

from specdist import provenance
from specdist.child_process import run_child
from specdist.errors import ArtifactError, SpecdistError
from specdist.evaluation.report import REPORT_FILE
from specdist.evaluation.summary import best_speed, gain_over_untrained
from specdist.export.record import EXPORT_FILE, read_record
from specdist.outbox import Outbox, OutboxArtifact, OutboxEntry
from specdist.registry.version import Version
from specdist.schema import EvalReport, GateDecision
from specdist.stages.evidence import CARD_FILE, DATASET_FILE, GATE_FILE, PAGE_FILE, evidence
from specdist.stages.run import Run, report_to
from specdist.tracking import offline_reason, offline_runs

logger = logging.getLogger(__name__)

WANDB_REGISTRY, SECONDS = "model", 600.0
_RELEASE_SECONDS = 60.0
# What a training process told wandb of its own run; the sender's is another
_OF_A_RUN = ("SERVICE", "RUN_ID", "RUN_GROUP", "NAME", "DIR", "MODE", "RESUME", "INIT_TIMEOUT", "FINISH_TIMEOUT")


def note_release(run: Run, report: EvalReport, decision: GateDecision) -> None:
    """Let what the run leaves wait in the registry's outbox, and try once to send it. Never raises, waits a minute.

    Does nothing where the run does not report to W&B. To repeat it for the same drafter and verdict changes nothing.
    """
    if "wandb" not in report_to(run.config.training):
        return
    root = run.registry.root
    try:
        new = Outbox(root).put(_entry(run, report, decision))
        for line in sync(root, seconds=_RELEASE_SECONDS) if new else []:
            logger.info("W&B: %s", line)
    except (SpecdistError, OSError) as error:
        logger.warning("W&B: nothing is sent of this release (%s); the registry has all of it", error)


def _entry(run: Run, report: EvalReport, decision: GateDecision) -> OutboxEntry:
    """What to send: of a published drafter the version's files, of a rejected one report and verdict alone."""
    name, outbox = run.config.release.model_name, Outbox(run.registry.root)
    published = [v for v in run.registry.versions() if v.tags.get("drafter_sha256") == report.drafter_sha256]
    version = published[-1] if published and decision.verdict != "reject" else None
    home = version.path if version else run.directory
    files = {file: outbox.relative(path) for file, path in evidence(home).items()}

    def artifact(kind: str, suffix: str, digest: str, *names: str, **metadata: object) -> OutboxArtifact:
        found = {file: files[file] for file in names if file in files}
        return OutboxArtifact(kind, f"{name}{suffix}", digest, found, metadata)

    data_digest = provenance.sha256_file(home / DATASET_FILE) if DATASET_FILE in files else None
    gate_digest = provenance.sha256_file(home / GATE_FILE)
    outputs = [
        artifact("evaluation", "-report", decision.report_sha256, REPORT_FILE, PAGE_FILE),
        artifact("gate", "-gate", gate_digest, GATE_FILE, verdict=decision.verdict, reason=decision.reason),
    ]
    if version is not None:
        outputs.insert(0, _drafter(name, version, outbox, report))
    return OutboxEntry(
        project=os.environ.get("WANDB_PROJECT", "specdist"),
        group=name,
        name=f"{name} version {version.number}" if version else f"{name}, rejected",
        inputs=[artifact("dataset", "-data", data_digest, DATASET_FILE)] if data_digest else [],
        outputs=outputs,
        metrics=_metrics(report, version),
        link=name if decision.verdict == "promote" else None,
        offline_runs=outbox.relative(offline_runs(run.directory)),
    )


def _drafter(name: str, version: Version, outbox: Outbox, report: EvalReport) -> OutboxArtifact:
    record = read_record(version.path)
    files = [*record.files, EXPORT_FILE, *(CARD_FILE for _ in version.path.glob(CARD_FILE))]
    paths = {file: outbox.relative(version.path / file) for file in files}
    metadata = {"version": version.number, "kind": record.drafter_kind, "target": report.target.model_id}
    metadata["target_weights_sha256"] = report.target.weights_sha256
    return OutboxArtifact("drafter", name, record.drafter_sha256, paths, metadata)


def _metrics(report: EvalReport, version: Version | None) -> dict[str, float]:
    """Numbers of one version, for curves over versions."""
    values: dict[str, float] = {} if version is None else {"version": float(version.number)}
    if (primary := report.primary) is not None:
        low, high = primary.summary.mean_accepted_length_interval
        values |= {"mean_accepted_length": primary.summary.mean_accepted_length, "mean_accepted_length_low": low}
        values |= {"mean_accepted_length_high": high, "acceptance_rate": primary.summary.acceptance_rate}
    if (gain := gain_over_untrained(report)) is not None:
        values["gain_over_untrained"] = gain[0]
    if (best := best_speed(report)) is not None:
        values["speedup"] = best.speedup
    return {f"release/{key}": value for key, value in values.items()}


def sync(root: Path, *, wandb_registry: str = WANDB_REGISTRY, seconds: float = SECONDS) -> list[str]:
    """Try to send all that waits below the registry `root`; returns what was sent and what remains, in lines of text.

    `wandb_registry`: the W&B Registry that promoted drafters are linked into; "" for none. `seconds`: the longest that
    one entry may take. What cannot be sent stays and is no error. Raises ArtifactError where there is no registry, or
    where an entry is damaged.
    """
    if not root.is_dir():
        raise ArtifactError(f"{root}: no registry here; give the root that the run wrote to")
    outbox = Outbox(root)
    waiting = outbox.pending()
    if not waiting:
        return ["nothing waits to be sent"]
    remain = f"wait in {outbox.directory}, and `specdist sync --root {root}` tries again"
    if reason := offline_reason():
        return [f"not sent: {reason}; {len(waiting)} {remain}"]
    lines, left = [], len(waiting)
    try:
        with FileLock(outbox.directory / ".lock", timeout=0):
            for entry in waiting:
                if fault := _send(root, entry, wandb_registry, seconds):
                    lines.append(f"not sent: {entry.name}: {fault}")
                    continue
                outbox.mark_sent(entry)
                left -= 1
                lines.append(f"sent: {entry.name} ({', '.join(a.name for a in entry.outputs)})")
    except Timeout:
        lines.append("another process is sending")
    return [*lines, f"{left} {remain}"] if left else lines


def _send(root: Path, entry: OutboxEntry, wandb_registry: str, seconds: float) -> str:
    """Send the offline runs that trained it, then the entry itself, each in a process; returns why not, "" if sent."""
    files = [root / path for artifact in (*entry.inputs, *entry.outputs) for path in artifact.files.values()]
    if missing := [file for file in files if not file.is_file()]:
        return f"{missing[0]} is gone; restore it, or remove the entry {entry.digest}.json"
    if (runs := unsent_runs(root, entry)) and (fault := _run(["-m", "wandb", "sync", *map(str, runs)], "", seconds)):
        return f"the run that trained it: {fault}"
    return _run(["-m", "specdist.stages.send", str(root), wandb_registry], json.dumps(entry.to_json()), seconds)


def unsent_runs(root: Path, entry: OutboxEntry) -> list[Path]:
    """The directories of the offline runs that trained it and have not been sent, oldest first."""
    place = root / entry.offline_runs
    found = place.glob("offline-run-*") if place.is_dir() else place.parent.glob(place.name)
    return sorted(path for path in found if not list(path.glob("*.synced")))


def _run(arguments: list[str], text: str, seconds: float) -> str:
    """Run a sender for at most `seconds`; returns the last it said where it failed, else "" ."""
    theirs = {f"WANDB_{name}" for name in _OF_A_RUN}
    return run_child(arguments, text, seconds=seconds, without=theirs).fault
