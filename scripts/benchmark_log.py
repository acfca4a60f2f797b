"""Raw results of a long measurement as JSON lines, so that a run that was killed goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError


class RawLog:
    """What was asked for in the first line, then a row for each prompt. A line that was cut short is dropped."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises ArtifactError where the file holds rows of other settings."""
        self.path, head = path, json.dumps(settings, ensure_ascii=False)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found = text[: text.rfind("\n") + 1].splitlines() or [head]
        if found[0] != head:
            known = json.loads(found[0])
            other = [f"{key} {known.get(key)!r}" for key in settings if known.get(key) != settings[key]]
            raise ArtifactError(
                f"{path}: holds results of other settings, of {'; '.join(other)}; choose another --output"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in found[1:]]

    @property
    def prompt_ids(self) -> set[str]:
        """Prompts that are done."""
        return {row["prompt_id"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
