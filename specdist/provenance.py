"""Owns hashes, atomic writes and the record of how a result was made (argv, versions, commit). Knows no configuration.

A reader never sees a half-written file or directory: writers use a temporary name beside the goal, sync, then rename.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError
from specdist.redaction import redacted_arguments

_PACKAGES = ("specdist", "torch", "transformers", "trl", "datasets", "accelerate", "peft", "wandb", "mlflow-skinny")
_UMASK = os.umask(0o077)  # can only be read by being set
os.umask(_UMASK)


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of `value`'s canonical JSON (sorted keys, no spaces)."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_tree(directory: Path, *, exclude: tuple[str, ...] = ()) -> str:
    """Hex SHA-256 over the relative names and contents of all files below `directory` but those named in `exclude`."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in exclude)
    return sha256_json({p.relative_to(directory).as_posix(): sha256_file(p) for p in files})


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish_file(path: Path) -> None:
    """Sync a file, and let all read it whom the umask lets: safetensors writes files for their owner alone."""
    with path.open("rb") as file:  # not to write, which the file's mode may forbid
        os.fsync(file.fileno())
    path.chmod(path.stat().st_mode | (0o444 & ~_UMASK))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling to write a file to; on success it is synced and becomes `path`, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        yield temporary
        _finish_file(temporary)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling directory to fill; on success it is synced and becomes `path`, replacing an old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _finish_file(file)
        sync_directory(temporary)
        if path.exists():
            old = path.with_name(f".old-{uuid.uuid4().hex[:8]}-{path.name}")
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old)
        else:
            os.rename(temporary, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed writer left below its temporary name. Only for who holds the directory's lock."""
    for path in (*directory.glob(".tmp-*"), *directory.glob(".old-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: sorted keys, indented; a number that is not finite is an error, never a token."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ArtifactError, naming it, where it is missing or does not parse."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; the stage that writes it has not finished") from None
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: not readable as JSON ({error}); delete it and run again") from error


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide results."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Commit of this source tree, with "-dirty" where it has changes; None unless it is a checkout of its own.

    An installed package may lie below another project's checkout, whose commit says nothing of it.
    """
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        prefix, head = (
            subprocess.run([*git, "rev-parse", what], capture_output=True, text=True, check=True).stdout.strip()
            for what in ("--show-prefix", "HEAD")
        )
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if prefix else head + ("-dirty" if status.stdout.strip() else "")


def provenance() -> dict[str, Any]:
    """How this process was started: argv, commit and versions. Holds no user or machine name, and no secret."""
    argv = [Path(sys.argv[0]).name, *redacted_arguments(sys.argv[1:])]
    return {"argv": argv, "git_commit": git_commit(), "versions": package_versions(), "platform": platform.platform()}
