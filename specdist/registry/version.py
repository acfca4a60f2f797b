"""Owns the directory of one version: an export and its evidence, written once, read-only, each file with its hash."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError, ConfigError
from specdist.export_record import read_record
from specdist.provenance import read_json, sha256_file, sha256_json, sync_directory, write_json

MANIFEST = "version.json"
TAG_DIGEST = "digest"  # of the export: the key that makes publishing idempotent
TAG_CREATED = "created"
TAG_ROLE = "role"  # of a version that is not proven: challenger
TAG_MEAN_ACCEPTED_LENGTH = "mean_accepted_length"  # given by whoever publishes; listed by the command line
TAG_MANIFEST = "manifest_sha256"


@dataclass(frozen=True)
class Version:
    """One published version. `digest` is the SHA-256 of its export (`provenance.sha256_tree` of that directory)."""

    number: str
    path: Path
    digest: str
    tags: dict[str, str]


def version_sources(export_dir: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Source of each file of a version by its name there. `files` (name: path) lie beside those of the export.

    Raises ArtifactError where a file is missing or two files would have one name.
    """
    if nested := sorted(name for name in files if Path(name).name != name):
        raise ConfigError(f"files {nested}: expected plain file names")
    export = {p.relative_to(export_dir).as_posix(): p for p in sorted(export_dir.rglob("*")) if p.is_file()}
    if clash := sorted({*files, MANIFEST} & set(export)) or {MANIFEST} & set(files):
        raise ArtifactError(f"{export_dir}: {clash} would be written twice; rename them in the export")
    if missing := [str(path) for path in files.values() if not path.is_file()]:
        raise ArtifactError(f"{missing}: no such file; the stage that writes it has not finished")
    return {**export, **files}


def checked_sources(
    export_dir: Path, files: dict[str, Path], tags: dict[str, str]
) -> tuple[dict[str, Path], dict[str, str], str]:
    """Source and SHA-256 of each file of a version by its name there, and the digest of the export alone.

    A damaged export is refused here, before anything is copied.
    """
    if reserved := {TAG_DIGEST, TAG_MANIFEST, TAG_CREATED, TAG_ROLE} & set(tags):
        raise ConfigError(f"tags {sorted(reserved)}: set by the registry; use other names")
    read_record(export_dir)
    sources = version_sources(export_dir, files)
    hashes = {name: sha256_file(path) for name, path in sources.items()}
    return sources, hashes, sha256_json({name: value for name, value in hashes.items() if name not in files})


def copy_files(sources: dict[str, Path], hashes: dict[str, str], directory: Path) -> None:
    """Copy `sources` below `directory`, synced. Raises ArtifactError where a copy is not what was hashed."""
    for name, source in sources.items():
        goal = directory / name
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, goal)
        with goal.open("rb+") as file:
            os.fsync(file.fileno())
        if sha256_file(goal) != hashes[name]:
            raise ArtifactError(f"{goal}: differs from {source}; that changed while being copied or a disk is faulty")


def seal(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make every file read-only and sync the directories."""
    write_json(directory / MANIFEST, manifest)
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            path.chmod(0o444)
    sync_directory(directory)


def verify_version(version: Version) -> None:
    """Hash the files of a version again. Raises ArtifactError naming those altered, missing or added."""
    manifest = version.path / MANIFEST
    if not manifest.is_file() or sha256_file(manifest) != version.tags.get(TAG_MANIFEST):
        raise ArtifactError(f"{manifest}: missing or altered since it was published; restore it or publish again")
    expected = read_json(manifest)["files"]
    paths = (path for path in version.path.rglob("*") if path.is_file() and path != manifest)
    found = {path.relative_to(version.path).as_posix(): sha256_file(path) for path in paths}
    if wrong := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        raise ArtifactError(f"{version.path}: altered, missing or added since it was published: {wrong}; restore them")
