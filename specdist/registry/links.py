"""Owns the alias links of a model, `aliases/<alias>` → `../versions/<N>`: what engines are told to open."""

import os
import uuid
from pathlib import Path

from specdist.provenance import sync_directory


class AliasLinks:
    """The links in one directory. They are relative, so that a registry may be moved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, alias: str) -> Path:
        """Where the link of an alias lies, whether there is one or not."""
        return self.directory / alias

    def number(self, alias: str) -> str | None:
        """The version that a link names; None where there is no link."""
        link = self.path(alias)
        return os.readlink(link).rpartition("/")[2] if link.is_symlink() else None

    def numbers(self) -> set[str]:
        """The versions that links name, whoever made them."""
        links = self.directory.glob("*") if self.directory.is_dir() else []
        return {number for link in links if (number := self.number(link.name)) is not None}

    def point(self, alias: str, number: str) -> None:
        """Make a link name a version, in one step: whoever opens it finds the old or the new one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".tmp-{uuid.uuid4().hex[:8]}"
        os.symlink(f"../versions/{number}", temporary)
        os.replace(temporary, self.path(alias))
        sync_directory(self.directory)

    def remove(self, alias: str) -> None:
        """Remove a link, if there is one."""
        if self.path(alias).is_symlink():
            self.path(alias).unlink()
            sync_directory(self.directory)
