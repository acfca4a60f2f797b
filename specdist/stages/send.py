"""Owns sending one entry of the outbox to W&B, as a run of its own: artifacts with their lineage, numbers, pictures.

    python -m specdist.stages.send ROOT REGISTRY < entry.json

stages/sync.py starts it as a process, which it can end: wandb may wait for a server without a limit.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from specdist import provenance
from specdist.evaluation.report import REPORT_FILE
from specdist.outbox import OutboxArtifact, OutboxEntry
from specdist.schema import EvalReport
from specdist.stages.evidence import PAGE_FILE

if TYPE_CHECKING:
    import wandb

_STEP = "release/version"


def send(root: Path, entry: OutboxEntry, wandb_registry: str, directory: Path, mode: str = "online") -> None:
    """Send it, and return when W&B has all of it. wandb writes its own files into `directory`.

    The run's id is the entry's digest and W&B knows artifacts by content, so an entry that is sent again, after a cut
    say, becomes no second run and no second version. `mode` "offline" writes what would be sent, without links.
    Raises wandb.Error, OSError, TimeoutError or ValueError where it cannot be sent.
    """
    import wandb

    settings = wandb.Settings(silent=True, console="off", init_timeout=30.0, disable_git=True)
    with wandb.init(
        project=entry.project,
        group=entry.group,
        name=entry.name,
        job_type="release",
        id=entry.digest,
        resume="allow" if mode == "online" else None,
        dir=directory,
        mode=mode,  # type: ignore[arg-type] # a literal there
        settings=settings,
    ) as run:
        for source in entry.inputs:  # an offline run cannot say what it used; it holds it as its own
            (run.use_artifact if mode == "online" else run.log_artifact)(_artifact(root, source))
        _log(run, root, entry)
        logged = {artifact.name: run.log_artifact(_artifact(root, artifact)) for artifact in entry.outputs}
        if mode != "online":
            return
        for artifact in logged.values():
            artifact.wait()
        if entry.link is not None and wandb_registry:
            run.link_artifact(logged[entry.link], f"wandb-registry-{wandb_registry}/{entry.link}")


def _artifact(root: Path, artifact: OutboxArtifact) -> "wandb.Artifact":
    import wandb

    made = wandb.Artifact(artifact.name, artifact.type, metadata={**artifact.metadata, "digest": artifact.digest})
    for name, path in artifact.files.items():
        made.add_file(str(root / path), name=name, policy="immutable")  # an absolute path stays what it is
    return made


def _log(run: "wandb.Run", root: Path, entry: OutboxEntry) -> None:
    """Numbers over the versions of a drafter, the table of domains, and the page with its pictures."""
    import wandb

    run.define_metric(_STEP)
    run.define_metric("release/*", step_metric=_STEP)
    files = {name: root / path for artifact in entry.outputs for name, path in artifact.files.items()}
    values: dict[str, object] = dict(entry.metrics)
    if REPORT_FILE in files:
        report = EvalReport.from_json(provenance.read_json(files[REPORT_FILE]), str(files[REPORT_FILE]))
        values["release/domains"] = wandb.Table(["domain", "prompts", "tau", "low", "high", "accepted"], _rows(report))
    if PAGE_FILE in files:
        values["release/report"] = wandb.Html(files[PAGE_FILE].read_text(encoding="utf-8"), inject=False)
    run.log(values)


def _rows(report: EvalReport) -> list[list[object]]:
    domains = report.primary.domains if report.primary else {}
    return [
        [name, s.num_prompts, s.mean_accepted_length, *s.mean_accepted_length_interval, s.acceptance_rate]
        for name, s in sorted(domains.items())
    ]


def main() -> None:
    """Send the entry that standard input holds; what fails is the last line on standard error."""
    root, wandb_registry = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as directory:
        send(root, OutboxEntry.from_json(json.load(sys.stdin), "entry"), wandb_registry, Path(directory))


if __name__ == "__main__":
    main()
