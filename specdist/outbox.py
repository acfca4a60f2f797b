"""Owns what waits to be sent to W&B: small JSON entries beside a registry, each named by the hash of its content.

    <root>/.outbox/<hash>.json          waits
    <root>/.outbox/sent/<hash>.json     has been sent

An entry that waits, or was sent, is not put in again. It names files and holds none; those that lie in the registry by
paths relative to it, so that a registry may be moved with all that waits.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.provenance import read_json, sha256_json, sync_directory, write_json
from specdist.record import Record


@dataclass(frozen=True)
class OutboxArtifact(Record):
    """One W&B artifact. `digest` says which content it has; `files` maps the name in it to the path of the file."""

    type: str
    name: str
    digest: str
    files: dict[str, str]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class OutboxEntry(Record):
    """What one judged drafter leaves to send: what it was made from (`inputs`), what came of it (`outputs`), numbers.

    `group` is the lineage's; `link`: the output that is linked into the W&B Registry, by its name; None for none.
    `offline_runs`: where W&B wrote the runs that trained it, as long as it was offline: a path whose last part is a
    glob pattern, or a directory with nothing else in it.
    """

    project: str
    group: str
    name: str
    inputs: list[OutboxArtifact]
    outputs: list[OutboxArtifact]
    metrics: dict[str, float]
    link: str | None
    offline_runs: str

    @property
    def digest(self) -> str:
        """16 hex digits over all of it: the id of its W&B run, so that sending it twice changes nothing."""
        return sha256_json(self.to_json())[:16]


class Outbox:
    """The entries of one registry. Making one touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / ".outbox"
        self._sent = self.directory / "sent"

    def put(self, entry: OutboxEntry) -> bool:
        """Let an entry wait, written whole; False where it waits already or was sent."""
        name = f"{entry.digest}.json"
        if (self.directory / name).exists() or (self._sent / name).exists():
            return False
        write_json(self.directory / name, entry.to_json())
        return True

    def pending(self) -> list[OutboxEntry]:
        """What waits, oldest first. Raises ArtifactError, naming the file, where one cannot be read."""
        files = sorted(self.directory.glob("[!.]*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        return [OutboxEntry.from_json(read_json(file), str(file)) for file in files]

    def mark_sent(self, entry: OutboxEntry) -> None:
        """Put an entry aside; it is not sent again."""
        self._sent.mkdir(exist_ok=True)
        os.replace(self.directory / f"{entry.digest}.json", self._sent / f"{entry.digest}.json")
        sync_directory(self._sent)

    def relative(self, path: Path) -> str:
        """How an entry names a file: from the registry's root where it lies in it, else absolute."""
        path, root = path.absolute(), self.root.absolute()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
