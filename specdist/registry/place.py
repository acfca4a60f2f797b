"""Owns what must hold of the place where a registry lies: it can be written, holds links, and engines read its path."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path

from specdist.config import MISREAD_IN_PATHS
from specdist.errors import ArtifactError, ConfigError

DATABASE = "mlflow.db"


def check_writable(root: Path, *, needed_bytes: int = 0) -> None:
    """Raise ArtifactError, naming the directory, unless a registry at `root` can be written with `needed_bytes` free.

    Creates the directory. Meant for the start of a run: hours of training must not end at a full disk, nor at a file
    system without symbolic links.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise ArtifactError(
            f"{root}: the registry cannot be written ({error}); free space, fix permissions or choose another directory"
        ) from error
    if free < needed_bytes:
        raise ArtifactError(f"{root}: {free} bytes free, the registry needs {needed_bytes}; free space on that disk")
    if (root / DATABASE).exists() and not os.access(root / DATABASE, os.W_OK):
        raise ArtifactError(f"{root / DATABASE}: the registry's record is read-only; fix its permissions")
    _check_links(root)


def _check_links(root: Path) -> None:
    link = root / f".tmp-{uuid.uuid4().hex[:8]}"  # what a kill leaves of it, the next writer removes
    try:
        os.symlink("nowhere", link)
        link.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"{root}: no symbolic link can be made here ({error}), and one names the version that serves; choose a "
            "registry on another file system"
        ) from error


def check_path(directory: Path) -> None:
    """Raise ConfigError where an engine would misread a path below `directory`, or a database URI cannot hold it."""
    path = str(directory)
    if found := [word for word in MISREAD_IN_PATHS if word in path.lower()]:
        raise ConfigError(
            f"{path}: vLLM misreads a path that contains {found}; give the registry or the model another name"
        )
    if bad := sorted(set("%?") & set(path)):
        raise ConfigError(f"{path}: {bad} cannot be part of a registry's path; choose another directory")
