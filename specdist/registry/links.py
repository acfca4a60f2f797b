"""Owns what engines are told to open: the link `aliases/<alias>` → `../versions/<N>`, and its twin in the cache."""

import os
import uuid
from pathlib import Path

from specdist.provenance import sync_directory
from specdist.registry.hub import HubCache


class AliasLinks:
    """The links in one directory, with their counterparts in `hub`. They are relative: a registry may be moved."""

    def __init__(self, directory: Path, hub: HubCache) -> None:
        self.directory, self.hub = directory, hub

    def path(self, alias: str) -> Path:
        """Where the link of an alias lies, whether there is one or not."""
        return self.directory / alias

    def number(self, alias: str) -> str | None:
        """The version that a link names; None where there is no link."""
        link = self.path(alias)
        return os.readlink(link).rpartition("/")[2] if link.is_symlink() else None

    def names(self, alias: str, number: str) -> bool:
        """Whether both lead to this version."""
        return self.number(alias) == number and self.hub.names(alias, number)

    def numbers(self) -> set[str]:
        """The versions that links name, whoever made them."""
        links = self.directory.glob("*") if self.directory.is_dir() else []
        return {number for link in links if (number := self.number(link.name)) is not None}

    def point(self, alias: str, number: str) -> None:
        """Make a link name a version, in one step: whoever opens it finds the old or the new one. Then the cache."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".tmp-{uuid.uuid4().hex[:8]}"
        os.symlink(f"../versions/{number}", temporary)
        os.replace(temporary, self.path(alias))
        sync_directory(self.directory)
        self.hub.point(alias, number)

    def remove(self, alias: str) -> None:
        """Remove a link and its counterpart, if there are any."""
        self.hub.remove(alias)
        if self.path(alias).is_symlink():
            self.path(alias).unlink()
            sync_directory(self.directory)
