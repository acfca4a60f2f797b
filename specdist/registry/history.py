"""Owns a model's history: every move of its champion, and which champion a rollback goes back to."""

import json
from datetime import UTC, datetime
from pathlib import Path

from specdist.errors import ArtifactError
from specdist.provenance import write_text


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class History:
    """The moves of one model's champion, in a file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def entries(self) -> list[dict[str, str]]:
        """Every move, oldest first: time (UTC), version, action (publish, rollback or repair)."""
        if not self.file.exists():
            return []
        try:
            return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ArtifactError(f"{self.file}: not JSON lines ({error}); restore or remove it") from error

    def append(self, number: str, action: str) -> None:
        """Add one move, in a file written whole: a kill could cut an appended line."""
        entries = [*self.entries(), {"time": now(), "version": number, "action": action}]
        write_text(self.file, "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries))

    def pile(self) -> list[str]:
        """Champions, the present one last: publishing puts one on top, going back takes some off."""
        pile: list[str] = []
        for entry in self.entries():
            if entry["action"] != "publish" and entry["version"] in pile:
                while pile[-1] != entry["version"]:
                    pile.pop()
            else:
                pile.append(entry["version"])
        return pile
