"""Owns `specdist report`: finds the reports of one drafter or several, and writes their page and pictures."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specdist import provenance
from specdist.errors import ConfigError
from specdist.evaluation.chart import Picture
from specdist.evaluation.overview import Judged, recommendation
from specdist.evaluation.overview_page import render_overview
from specdist.evaluation.page import render_page
from specdist.evaluation.pictures import draw_pictures
from specdist.evaluation.pictures_of_many import draw_overview
from specdist.evaluation.report import REPORT_FILE
from specdist.evaluation.summary import sentences
from specdist.registry.names import named_version
from specdist.schema import EvalReport, GateDecision
from specdist.stages.evidence import GATE_FILE


def find_report(name: str, root: Path) -> Path:
    """The file of the report that `name` means: itself, that of a directory (a run, a version), or MODEL[@N]'s.

    MODEL alone is its champion. Raises ArtifactError where the registry at `root` has none.
    """
    path = Path(name)
    if path.is_file():
        return path
    return (path if path.is_dir() else named_version(name, root, REPORT_FILE)) / REPORT_FILE


def read_named(name: str, root: Path) -> Judged:
    """The report that `name` means, with the gate's verdict that lies beside it. Raises ArtifactError."""
    file = find_report(name, root)
    gate = file.with_name(GATE_FILE)
    decision = GateDecision.from_json(provenance.read_json(gate), str(gate)) if gate.exists() else None
    return Judged(_shown(name), EvalReport.from_json(provenance.read_json(file), str(file)), decision)


def _shown(name: str) -> str:
    """The end of a path, which tells runs apart and says nothing of the machine; other names as given."""
    path = Path(name)
    if not path.exists():
        return name
    parts = path.resolve().parts[1:]
    return "/".join(parts[-3:-1] if parts[-1] == REPORT_FILE else parts[-2:])


def report(names: Sequence[str], page: Path, root: Path, png: Path | None = None) -> list[str]:
    """Write the page of the named drafters, and their pictures as PNG into directory `png`; returns lines of text.

    Raises ConfigError where a drafter is named twice.
    """
    drafters = _short([read_named(name, root) for name in names])
    if len({drafter.name for drafter in drafters}) < len(drafters):
        raise ConfigError(f"{list(names)}: two of these are one drafter, or end alike; name each once")
    if len(drafters) == 1:
        one = drafters[0]
        said, html = sentences(one.report), render_page(one.report, one.decision)
        pictures = draw_pictures(one.report) if png else []
    else:
        said, html = recommendation(drafters), render_overview(drafters)
        pictures = draw_overview(drafters) if png else []
    provenance.write_text(page, html)
    return [*said, "", f"page: {page}", *(_write_png(picture, png) for picture in pictures if png)]


def _short(drafters: Sequence[Judged]) -> list[Judged]:
    """The same without a directory that all their names begin with, which tells them apart in nothing."""
    heads = {drafter.name.partition("/")[0] for drafter in drafters if "/" in drafter.name}
    if len(drafters) < 2 or len(heads) > 1 or not all("/" in drafter.name for drafter in drafters):
        return list(drafters)
    return [replace(drafter, name=drafter.name.partition("/")[2]) for drafter in drafters]


def _write_png(picture: Picture, directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{re.sub(r'[^a-z0-9]+', '-', picture.title.lower()).strip('-')}.png"
    with provenance.atomic_path(file) as temporary:
        temporary.write_bytes(picture.png)
    return f"picture: {file}"
