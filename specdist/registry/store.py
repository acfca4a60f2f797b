"""Owns a registry on disk: publishing a version whole or not at all, the champion link, its history, rolling back.

    <root>/mlflow.db                        the record: versions, tags, champion alias
    <root>/<model>/versions/<N>/            an export, its evidence, version.json; never changes
    <root>/<model>/aliases/champion         link to ../versions/<N>: what an engine is told to serve
    <root>/<model>/history.jsonl            every move of the champion

The champion is the version that the alias in MLflow names; link and history follow it and are repaired from it.
Nothing holds an absolute path, so a registry may be moved. All writers of a root share one lock.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from specdist.config import MISREAD_IN_PATHS
from specdist.errors import ArtifactError, ConfigError
from specdist.provenance import read_json, sha256_file, sha256_json, sync_directory, write_text
from specdist.registry.mlflow import CHAMPION, ModelRecord, check_location, create_database, open_record
from specdist.registry.version import (
    MANIFEST,
    TAG_MANIFEST,
    Version,
    copy_files,
    seal,
    verify_version,
    version_sources,
)

TAG_DIGEST = "digest"  # of the export: the key that makes publishing idempotent
TAG_CREATED = "created"
TAG_MEAN_ACCEPTED_LENGTH = "mean_accepted_length"  # given by whoever publishes; listed by the command line

_DATABASE = "mlflow.db"
_LOCK_SECONDS = 600.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)


def check_writable(root: Path, *, needed_bytes: int = 0) -> None:
    """Raise ArtifactError, naming the directory, unless a registry at `root` can be written with `needed_bytes` free.

    Creates the directory. Meant for the start of a run: hours of training must not end at a full disk.
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
    if (root / _DATABASE).exists() and not os.access(root / _DATABASE, os.W_OK):
        raise ArtifactError(f"{root / _DATABASE}: the registry's record is read-only; fix its permissions")


def model_names(root: Path) -> list[str]:
    """Names of the models in the registry at `root`. Raises ArtifactError where there is none."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no registry here; publish a model first or give another root")
    return sorted(path.parent.name for path in root.glob("*/versions"))


class Registry:
    """The versions of one model. Making one touches nothing; writing calls create, lock and repair what they need."""

    def __init__(self, root: Path, model_name: str) -> None:
        """Raises ConfigError on a name that is no plain directory name or that an engine would misread."""
        if not _NAME.fullmatch(model_name):
            raise ConfigError(f"model name {model_name!r}: expected letters, digits, '.', '_' and '-'")
        if found := [word for word in MISREAD_IN_PATHS if word in model_name.lower()]:
            raise ConfigError(f"model name {model_name!r}: vLLM misreads a path that contains {found}; rename it")
        self.root = Path(root).absolute()
        self.model_name = model_name
        self.directory = self.root / model_name
        self._versions_directory = self.directory / "versions"
        self._link = self.directory / "aliases" / CHAMPION
        self._history_file = self.directory / "history.jsonl"
        self._database = self.root / _DATABASE
        self._remedy = f"restore it or go back with `specdist registry rollback {model_name} --to N`"
        check_location(self._database)

    # Reading

    def champion(self) -> Version | None:
        """The version that serves; None before the first publication.

        Raises ArtifactError where the alias points to a missing version: that is never "no champion".
        """
        with self._reading() as record:
            return self._champion(record)

    def versions(self) -> list[Version]:
        """All published versions, oldest first. The directory of one may have been removed from outside."""
        with self._reading() as record:
            return self._versions(record)

    def get(self, number: str | int) -> Version:
        """Version `number`. Raises ArtifactError where it is not in the record or its directory is missing."""
        with self._reading() as record:
            return self._get(record, str(number))

    def verify(self, version: Version) -> None:
        """Hash the files of a version again. Raises ArtifactError naming those altered, missing or added."""
        verify_version(version)

    def champion_path(self) -> Path:
        """Absolute path of the champion link, for an engine. Raises ArtifactError where it leads nowhere."""
        if not self._link.is_symlink():
            raise ArtifactError(f"{self._link}: no such link; {self.model_name} has no champion in this registry")
        if not self._link.is_dir():
            raise ArtifactError(f"{self._link}: points to missing version {self._linked()}; {self._remedy}")
        return self._link

    def history(self) -> list[dict[str, str]]:
        """Every move of the champion, oldest first: time (UTC), version, action (publish, rollback or repair)."""
        if not self._history_file.exists():
            return []
        try:
            return [json.loads(line) for line in self._history_file.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ArtifactError(f"{self._history_file}: not JSON lines ({error}); restore or remove it") from error

    # Writing

    def publish(
        self, export_dir: Path, *, files: dict[str, Path], tags: dict[str, str], expected_champion: str | None
    ) -> str:
        """Copy an export into a new version, record it, make it champion; returns its number.

        `files` (name: path) are placed beside the export. `expected_champion` is the version that the gate judged
        against: where another one serves by now, ArtifactError is raised and nothing changes. An export that is
        already a version is not copied again; its directory stays as it is, `tags` are set. So a publication that was
        interrupted anywhere is completed by repeating it.
        """
        if reserved := {TAG_DIGEST, TAG_MANIFEST, TAG_CREATED} & set(tags):
            raise ConfigError(f"tags {sorted(reserved)}: set by the registry; use other names")
        sources = version_sources(export_dir, files)
        hashes = {name: sha256_file(path) for name, path in sources.items()}
        digest = sha256_json({name: value for name, value in hashes.items() if name not in files})
        with self._writing() as record:
            champion = self._champion(record)
            if champion is not None and champion.digest == digest:
                return champion.number
            self._check_champion(champion, expected_champion)
            known = [v for v in self._versions(record) if v.digest == digest and v.path.is_dir()]
            if known:
                number = known[-1].number
                verify_version(known[-1])
                record.set_tags(number, tags)
            else:
                number = self._add_version(record, sources, hashes, {**tags, TAG_DIGEST: digest})
            self._check_champion(self._champion(record), expected_champion)  # MLflow's own tools take no lock
            self._promote(record, number, "publish")
            return number

    def rollback(self, to: str | int | None = None) -> Version:
        """Make an earlier champion champion again: `to`, or the one before the present one. Its files are verified.

        Raises ArtifactError where there is none, or where `to` never was champion: the gate has not let it in.
        """
        with self._writing() as record:
            target = self._previous() if to is None else str(to)
            version = self._get(record, target)
            if target not in {entry["version"] for entry in self.history()}:
                raise ArtifactError(
                    f"{self.model_name}: version {target} never was champion, so the gate has not passed it"
                )
            verify_version(version)
            self._promote(record, target, "rollback")
            return version

    def reconcile(self) -> None:
        """Finish what an interrupted writer left: records, history and link. Every writing call begins with this."""
        with self._writing():
            pass

    # Parts

    @contextmanager
    def _reading(self) -> Iterator[ModelRecord | None]:
        if not self._database.exists():
            yield None
            return
        with open_record(self._database, self.model_name) as record:
            yield record

    @contextmanager
    def _writing(self) -> Iterator[ModelRecord]:
        check_writable(self.root)
        lock = self.root / ".lock"
        try:
            with FileLock(lock, timeout=_LOCK_SECONDS):
                self._remove_leftovers()
                if not self._database.exists():
                    create_database(self._database)
                with open_record(self._database, self.model_name) as record:
                    self._reconcile(record)
                    yield record
        except Timeout as error:
            raise ArtifactError(f"{lock}: held by another process for {_LOCK_SECONDS:.0f} s; wait for it") from error
        except OSError as error:
            raise ArtifactError(
                f"{self.root}: writing the registry failed ({error}); repeat once it is fixed"
            ) from error

    def _remove_leftovers(self) -> None:
        # Whoever holds the lock is the only writer: a temporary name belongs to one that was killed.
        for directory in (self.root, self._versions_directory, self._link.parent, self.directory):
            for path in directory.glob(".tmp-*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _reconcile(self, record: ModelRecord) -> None:
        numbers = sorted(int(p.name) for p in self._versions_directory.glob("*") if p.name.isdecimal())
        for number in numbers:
            if number > record.last_number():  # a lower one without a record was deleted in MLflow on purpose
                self._record_version(record, str(number))
        try:
            champion = self._champion(record)
        except ArtifactError as error:  # raised again for who needs the champion; a rollback must still be possible
            _log.warning("%s", error)
            return
        if champion is None:
            return
        history = self.history()
        if not history or history[-1]["version"] != champion.number:
            self._append_history(champion.number, "repair")
        if self._linked() != champion.number:
            self._point_link(champion.number)

    def _versions(self, record: ModelRecord | None) -> list[Version]:
        recorded = record.versions() if record else {}
        return [
            Version(number, self._versions_directory / number, tags[TAG_DIGEST], tags)
            for number, tags in recorded.items()
            if TAG_DIGEST in tags
        ]

    def _get(self, record: ModelRecord | None, number: str) -> Version:
        versions = {version.number: version for version in self._versions(record)}
        if number not in versions:
            raise ArtifactError(f"{self.model_name}: no version {number} in {self.root}; there are {list(versions)}")
        if not versions[number].path.is_dir():
            raise ArtifactError(f"{versions[number].path}: version {number} is recorded, but its directory is missing")
        return versions[number]

    def _champion(self, record: ModelRecord | None) -> Version | None:
        try:
            if record is not None and (number := record.champion()) is not None:
                return self._get(record, number)
        except ArtifactError as error:
            raise ArtifactError(
                f"champion of {self.model_name} points to missing version ({error}); {self._remedy}"
            ) from error
        if self._link.is_symlink():
            raise ArtifactError(
                f"{self._link}: serves version {self._linked()}, but the record names no champion; set it with "
                f"`specdist registry rollback {self.model_name} --to {self._linked()}`"
            )
        return None

    def _check_champion(self, champion: Version | None, expected: str | int | None) -> None:
        number = champion.number if champion else None
        if number != (None if expected is None else str(expected)):
            raise ArtifactError(
                f"{self.model_name}: champion is {number}, but the gate judged against {expected}; run the gate again"
            )

    def _add_version(
        self, record: ModelRecord, sources: dict[str, Path], hashes: dict[str, str], tags: dict[str, str]
    ) -> str:
        check_writable(self.root, needed_bytes=sum(path.stat().st_size for path in sources.values()))
        number = str(record.last_number() + 1)
        temporary = self._versions_directory / f".tmp-{uuid.uuid4().hex[:8]}"
        try:
            copy_files(sources, hashes, temporary)
            seal(temporary, {"files": hashes, "tags": {**tags, TAG_CREATED: _now()}})
            os.rename(temporary, self._versions_directory / number)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for directory in (self._versions_directory, self.directory, self.root):  # all three may be new
            sync_directory(directory)
        self._record_version(record, number)
        return number

    def _record_version(self, record: ModelRecord, number: str) -> None:
        manifest = self._versions_directory / number / MANIFEST
        tags = {**read_json(manifest)["tags"], TAG_MANIFEST: sha256_file(manifest)}
        record.create(number, f"{self.model_name}/versions/{number}", tags)

    def _promote(self, record: ModelRecord, number: str, action: str) -> None:
        record.set_champion(number)  # the commit point
        self._append_history(number, action)
        self._point_link(number)
        _log.info("%s: version %s is champion (%s)", self.model_name, number, action)

    def _append_history(self, number: str, action: str) -> None:
        entries = [*self.history(), {"time": _now(), "version": number, "action": action}]
        # Written whole: a kill could cut an appended line.
        write_text(self._history_file, "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries))

    def _previous(self) -> str:
        """The champion below the present one on the pile: publishing puts one on top, going back takes some off."""
        pile: list[str] = []
        for entry in self.history():
            if entry["action"] != "publish" and entry["version"] in pile:
                while pile[-1] != entry["version"]:
                    pile.pop()
            else:
                pile.append(entry["version"])
        if len(pile) < 2:
            raise ArtifactError(f"{self.model_name}: no earlier champion to go back to ({self._history_file})")
        return pile[-2]

    def _linked(self) -> str | None:
        return os.readlink(self._link).rpartition("/")[2] if self._link.is_symlink() else None

    def _point_link(self, number: str) -> None:
        self._link.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._link.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
        os.symlink(f"../versions/{number}", temporary)
        os.replace(temporary, self._link)
        sync_directory(self._link.parent)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
