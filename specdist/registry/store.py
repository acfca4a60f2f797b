"""Owns a registry on disk: publishing a version whole or not at all, the champion link, its history, rolling back.

    <root>/mlflow.db                        the record: versions, tags, champion alias
    <root>/<model>/versions/<N>/            an export, its evidence, version.json; never changes
    <root>/<model>/aliases/champion         link to ../versions/<N>: what an engine is told to serve
    <root>/<model>/aliases/challenger       the same, of the version that was put forward and is not proven
    <root>/<model>/history.jsonl            every move of the champion
    <root>/.hub/                            the aliases once more, as a Hugging Face cache (hub.py)

The champion is the version that the alias in MLflow names: setting it is the commit point of every move. Link and
history follow it and are repaired from it. Nothing holds an absolute path, so a registry may be moved. All writers of a
root share one lock.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specdist.errors import ArtifactError, ConfigError, StaleBaseline
from specdist.provenance import read_json, sha256_file, sync_directory
from specdist.registry.history import History, now
from specdist.registry.hub import HubCache
from specdist.registry.links import AliasLinks
from specdist.registry.mlflow import CHALLENGER, CHAMPION, ModelRecord, create_database, open_record
from specdist.registry.place import DATABASE, check_path, check_writable
from specdist.registry.version import (
    MANIFEST,
    TAG_CREATED,
    TAG_DIGEST,
    TAG_MANIFEST,
    TAG_ROLE,
    Version,
    checked_sources,
    copy_files,
    seal,
    verify_version,
)

_LOCK_SECONDS = 600.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)


def model_names(root: Path) -> list[str]:
    """Names of the models in the registry at `root`. Raises ArtifactError where there is none."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no registry here; publish a model first or give another root")
    return sorted(path.parent.name for path in root.glob("*/versions"))


class Registry:
    """The versions of one model. Making one touches nothing; writing calls create, lock and repair what they need."""

    def __init__(self, root: Path, model_name: str) -> None:
        """Raises ConfigError on a name that is no plain directory name, or a path that an engine would misread."""
        if not _NAME.fullmatch(model_name):
            raise ConfigError(f"model name {model_name!r}: expected letters, digits, '.', '_' and '-'")
        self.root = Path(root).absolute()
        self.model_name = model_name
        self.directory = self.root / model_name
        check_path(self.directory)
        self._versions_directory = self.directory / "versions"
        self._links = AliasLinks(self.directory / "aliases", HubCache(self.root, model_name))
        self._link = self._links.path(CHAMPION)
        self._history = History(self.directory / "history.jsonl")
        self._database = self.root / DATABASE
        self._remedy = f"restore it or go back with `specdist registry rollback {model_name} --to N`"

    # Reading

    def champion(self) -> Version | None:
        """The version that serves; None before the first publication.

        Raises ArtifactError where the alias points to a missing version: that is never "no champion".
        """
        with self._reading() as record:
            return self._champion(record)

    def challenger(self) -> Version | None:
        """The version that was put forward last and not promoted; None where there is none."""
        with self._reading() as record:
            return self._challenger(record)

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
            raise ArtifactError(
                f"{self._link}: points to missing version {self._links.number(CHAMPION)}; {self._remedy}"
            )
        return self._link

    def history(self) -> list[dict[str, str]]:
        """Every move of the champion, oldest first: time (UTC), version, action (publish, rollback or repair)."""
        return self._history.entries()

    # Writing

    def publish(
        self, export_dir: Path, *, files: dict[str, Path], tags: dict[str, str], expected_champion: str | None
    ) -> str:
        """Copy an export into a new version, record it, make it champion; returns its number.

        The export is checked against its record; `files` (name: path) are placed beside it. `expected_champion` is the
        version that the gate judged against: where another one serves by now, StaleBaseline is raised and nothing
        changes. An export that is already a version is not copied again; its directory stays as it is, `tags` are set.
        So a publication that was interrupted anywhere is completed by repeating it.
        """
        sources, hashes, digest = checked_sources(export_dir, files, tags)
        with self._writing() as record:
            champion = self._champion(record)
            if champion is not None and champion.digest == digest:
                return champion.number
            self._check_champion(champion, expected_champion)
            if known := self._known(record, digest, role=None):
                number = known.number
                verify_version(known)
                record.set_tags(number, tags)
            else:
                number = self._add_version(record, sources, hashes, {**tags, TAG_DIGEST: digest})
            self._check_champion(self._champion(record), expected_champion)  # MLflow's own tools take no lock
            self._promote(record, number, "publish")
            challenger = self._challenger(record)
            if challenger is not None and challenger.digest == digest:
                self._dismiss_challenger(record)
            return number

    def challenge(self, export_dir: Path, *, files: dict[str, Path], tags: dict[str, str]) -> str | None:
        """Copy an export that is not proven into a version that the challenger alias names; returns its number.

        Nothing that serves changes. One that is promoted later becomes another version, with the evidence of that.
        The champion is no challenger to itself: of its export nothing is made, and None returned.
        """
        sources, hashes, digest = checked_sources(export_dir, files, tags)
        with self._writing() as record:
            champion = self._champion(record)
            if champion is not None and champion.digest == digest:
                return None
            if known := self._known(record, digest, role=CHALLENGER):
                number = known.number
            else:
                role = {TAG_DIGEST: digest, TAG_ROLE: CHALLENGER}
                number = self._add_version(record, sources, hashes, {**tags, **role})
            record.set_alias(CHALLENGER, number)
            self._links.point(CHALLENGER, number)
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

    def prune(self, keep: int) -> list[str]:
        """Delete old versions but the newest `keep`; returns the numbers of those deleted.

        What an alias or a link names always stays, and so does the champion that a rollback would go back to. Repeating
        it completes one that was interrupted.
        """
        if keep < 0:
            raise ConfigError(f"keep {keep}: expected 0 or more versions")
        with self._writing() as record:
            recorded, found = self._versions(record), self._numbered_directories()
            champions = self._history.pile()[-2:]
            kept = {*record.aliases().values(), *self._links.numbers(), *champions}
            kept |= {version.number for version in recorded[len(recorded) - keep :]}
            doomed = sorted({version.number for version in recorded} | set(found), key=int)
            doomed = [number for number in doomed if number not in kept]
            for number in doomed:
                self._delete(record, number, recorded=any(version.number == number for version in recorded))
            self._links.hub.tidy()
            return doomed

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
        for directory in (self.root, self._versions_directory, self._links.directory, self.directory):
            for path in directory.glob(".tmp-*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)  # that with which another process tries the place
        self._links.hub.tidy()

    def _numbered_directories(self) -> list[str]:
        return sorted((p.name for p in self._versions_directory.glob("*") if p.name.isdecimal()), key=int)

    def _reconcile(self, record: ModelRecord) -> None:
        for number in self._numbered_directories():
            if int(number) > record.last_number():  # a lower one without a record was deleted on purpose
                self._record_version(record, number)
        challenger = self._challenger(record)
        if challenger is None:
            self._links.remove(CHALLENGER)
        elif not self._links.names(CHALLENGER, challenger.number):
            self._links.point(CHALLENGER, challenger.number)
        try:
            champion = self._champion(record)
        except ArtifactError as error:  # raised again for who needs the champion; a rollback must still be possible
            _log.warning("%s", error)
            return
        if champion is None:
            return
        history = self.history()
        if not history or history[-1]["version"] != champion.number:
            self._history.append(champion.number, "repair")
        if not self._links.names(CHAMPION, champion.number):
            self._links.point(CHAMPION, champion.number)

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
                f"{self._link}: serves version {self._links.number(CHAMPION)}, but the record names no champion; set "
                f"it with `specdist registry rollback {self.model_name} --to {self._links.number(CHAMPION)}`"
            )
        return None

    def _challenger(self, record: ModelRecord | None) -> Version | None:
        number = record.aliases().get(CHALLENGER) if record else None
        return next((v for v in self._versions(record) if v.number == number and v.path.is_dir()), None)

    def _dismiss_challenger(self, record: ModelRecord) -> None:
        record.delete_alias(CHALLENGER)
        self._links.remove(CHALLENGER)

    def _known(self, record: ModelRecord, digest: str, role: str | None) -> Version | None:
        """The newest version of an export, which was put forward in this role."""
        found = [v for v in self._versions(record) if v.digest == digest and v.tags.get(TAG_ROLE) == role]
        return next((v for v in reversed(found) if v.path.is_dir()), None)

    def _check_champion(self, champion: Version | None, expected: str | int | None) -> None:
        number = champion.number if champion else None
        if number != (None if expected is None else str(expected)):
            raise StaleBaseline(
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
            seal(temporary, {"files": hashes, "tags": {**tags, TAG_CREATED: now()}})
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
        self._history.append(number, action)
        self._links.point(CHAMPION, number)
        _log.info("%s: version %s is champion (%s)", self.model_name, number, action)

    def _delete(self, record: ModelRecord, number: str, *, recorded: bool) -> None:
        """The record first: a directory without one is no version, and the next `prune` finds it."""
        if recorded:
            record.delete(number)
        directory = self._versions_directory / number
        if directory.is_dir():
            temporary = directory.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
            os.rename(directory, temporary)  # at once, so that no part of it is ever found under its number
            sync_directory(self._versions_directory)
            shutil.rmtree(temporary)
        _log.info("%s: version %s deleted", self.model_name, number)

    def _previous(self) -> str:
        """The champion below the present one on the pile."""
        pile = self._history.pile()
        if len(pile) < 2:
            raise ArtifactError(f"{self.model_name}: no earlier champion to go back to ({self._history.file})")
        return pile[-2]
