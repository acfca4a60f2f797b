"""data/README.md has a row for every key of every record that is written to disk, and for no other."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from specdist.record import Record

ROOT = Path(__file__).resolve().parents[1]
NOT_ON_DISK = {"ReloadRequest"}  # goes to another process
_CLASS = re.compile(r"^class (\w+)\(Record\)", re.MULTILINE)


def records() -> list[type[Record]]:
    """Every record of the package, by its source."""
    found = []
    for file in sorted((ROOT / "specdist").rglob("*.py")):
        for name in _CLASS.findall(file.read_text(encoding="utf-8")):
            if name not in NOT_ON_DISK:
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                found.append(getattr(importlib.import_module(module), name))
    return found


def documented() -> dict[str, list[str]]:
    """The keys of each class: of the table that it heads, or of the row that it begins in a table of parts."""
    keys: dict[str, list[str]] = {}
    heading = ""
    lines = (ROOT / "data" / "README.md").read_text(encoding="utf-8").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("| "):
            continue
        first, second = line.strip("|").split(" | ", 1)
        names = re.findall(r"`(\w+)(?:\[i\])?`", first)
        if following.startswith("|---"):
            heading = names[0] if names else first.strip()
        elif heading == "part":
            keys.setdefault(names[0], []).extend(re.findall(r"`(\w+)(?:\[i\])?`", second))
        else:
            keys.setdefault(heading, []).extend(names)
    return keys


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_every_key_has_a_row_and_every_row_a_key(record: type[Record]) -> None:
    found = documented().get(record.__name__, [])
    fields = [field.name for field in dataclasses.fields(record)]
    values = {"greedy", "probabilistic", "chain", "tree", "fold", "reject", "hold"}  # of some keys, in parts
    assert sorted(name for name in found if name not in values) == sorted(fields)
