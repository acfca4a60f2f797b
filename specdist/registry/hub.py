"""Owns the second door to what serves: a Hugging Face cache in which each alias is a revision of the model.

    <root>/.hub/models--<model>/refs/<alias>            the commit that the alias names
    <root>/.hub/models--<model>/snapshots/<commit>      link to ../../../<model>/versions/<N>
    <root>/.hub/models--<model>/blobs/                  empty: snapshots are the versions themselves

Whatever opens `<model>` at revision `champion` from a cache opens the champion, without a path of ours and without our
code. Commits are made of model and number, which never name another version; 40 hex digits, so that who reads several
files stays with one version when the alias moves in between. Links are relative, as the registry may be moved.
"""

import hashlib
import os
import uuid
from pathlib import Path

from specdist.provenance import sync_directory, write_text

HUB_DIRECTORY = ".hub"


class HubCache:
    """The cache's part of one model. Making one touches nothing."""

    def __init__(self, root: Path, model_name: str) -> None:
        self._model_name = model_name
        self._model = root / HUB_DIRECTORY / f"models--{model_name}"
        self._snapshots, self._refs = self._model / "snapshots", self._model / "refs"

    def commit(self, number: str) -> str:
        """The name of a version as a commit: 40 hex digits."""
        return hashlib.sha256(f"{self._model_name}/versions/{number}".encode()).hexdigest()[:40]

    def names(self, alias: str, number: str) -> bool:
        """Whether the alias leads to this version."""
        ref, snapshot = self._refs / alias, self._snapshots / self.commit(number)
        return ref.is_file() and ref.read_text(encoding="utf-8") == snapshot.name and snapshot.is_symlink()

    def point(self, alias: str, number: str) -> None:
        """Make an alias name a version: its snapshot first, then the reference in one step."""
        for directory in (self._snapshots, self._refs, self._model / "blobs"):
            directory.mkdir(parents=True, exist_ok=True)
        snapshot = self._snapshots / self.commit(number)
        if not snapshot.is_symlink():
            temporary = snapshot.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
            os.symlink(f"../../../{self._model_name}/versions/{number}", temporary)
            os.replace(temporary, snapshot)
            sync_directory(self._snapshots)
        write_text(self._refs / alias, snapshot.name)

    def remove(self, alias: str) -> None:
        """Remove an alias, if there is one."""
        (self._refs / alias).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what a killed writer left, and snapshots of versions that are gone."""
        for directory in (self._snapshots, self._refs):
            for path in directory.glob(".tmp-*"):
                path.unlink()
        for snapshot in self._snapshots.glob("*"):
            if not snapshot.exists():
                snapshot.unlink()
