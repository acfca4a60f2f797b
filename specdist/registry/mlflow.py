"""Owns the record in MLflow: which versions of a model exist, their tags, and which one the champion alias names.

The only importer of mlflow, which is lazy (it costs a second). The registry store is opened without a tracking store,
so no experiment and no `mlruns` directory appear. Version numbers are strings here, whatever MLflow returns.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError
from specdist.provenance import atomic_path

CHAMPION, CHALLENGER = "champion", "challenger"
_SQLITE_MAGIC = b"SQLite format 3\x00"


def _store_class() -> Any:
    """MLflow's registry store, imported without telemetry and without noise."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():  # MLflow's own table definitions use a deprecated form of SQLAlchemy
        warnings.simplefilter("ignore")
        from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    for name in ("mlflow.store.db.utils", "alembic"):  # migration progress is of no use to the user
        logging.getLogger(name).setLevel(logging.WARNING)
    return SqlAlchemyStore


def _error_code(error: Exception) -> str:
    """MLflow's name of an error; re-raises what is none of its errors."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        raise error
    return error.error_code


def create_database(database: Path) -> None:
    """Create a migrated, empty database. It appears whole or not at all, so readers need no lock; writers hold one."""
    with atomic_path(database) as temporary:
        _store_class()(f"sqlite:///{temporary}").engine.dispose()


class ModelRecord:
    """What MLflow knows about one model. Made by `open_record`."""

    def __init__(self, store: Any, model_name: str) -> None:
        self._store = store
        self._name = model_name

    def versions(self) -> dict[str, dict[str, str]]:
        """Tags of each version by its number, in ascending order."""
        found: dict[str, dict[str, str]] = {}
        token = None
        while True:
            page = self._store.search_model_versions(f"name = '{self._name}'", page_token=token)
            found.update({str(item.version): dict(item.tags) for item in page})
            if not (token := page.token):
                return dict(sorted(found.items(), key=lambda item: int(item[0])))

    def last_number(self) -> int:
        """The highest number ever given, deleted versions included; 0 where there was none."""
        from sqlalchemy import text

        query = text("SELECT MAX(version) FROM model_versions WHERE name = :name")
        with self._store.engine.connect() as connection:
            return connection.execute(query, {"name": self._name}).scalar() or 0

    def champion(self) -> str | None:
        """Number of the version that the champion alias names; None where there is no alias.

        Asked through the alias call: lists of versions come back without aliases. Raises ArtifactError where the alias
        names a version that is gone.
        """
        if not self._exists():
            return None
        try:
            return str(self._store.get_model_version_by_alias(self._name, CHAMPION).version)
        except Exception as error:
            if (code := _error_code(error)) == "INVALID_PARAMETER_VALUE":
                return None
            if code == "RESOURCE_DOES_NOT_EXIST":
                raise ArtifactError(f"alias {CHAMPION} of {self._name}: {error}") from error
            raise

    def create(self, number: str, source: str, tags: dict[str, str]) -> None:
        """Record version `number` with its source, which is relative to the registry's root, and its tags.

        Numbers below it that are still free (of versions lost together with an earlier database) are used up.
        """
        from mlflow.entities.model_registry import ModelVersionTag

        if not self._exists():
            self._store.create_registered_model(self._name)
        while self.last_number() < int(number) - 1:
            unused = self._store.create_model_version(self._name, "unused")
            self._store.delete_model_version(self._name, str(unused.version))
        entities = [ModelVersionTag(key, value) for key, value in tags.items()]
        created = str(self._store.create_model_version(self._name, source, tags=entities).version)
        if created != number:
            self._store.delete_model_version(self._name, created)
            raise ArtifactError(
                f"{self._name}: version {number} was recorded as {created}; "
                "something else writes to this registry, run again"
            )

    def set_tags(self, number: str, tags: dict[str, str]) -> None:
        """Set tags of a recorded version."""
        from mlflow.entities.model_registry import ModelVersionTag

        for key, value in tags.items():
            self._store.set_model_version_tag(self._name, number, ModelVersionTag(key, value))

    def aliases(self) -> dict[str, str]:
        """Number of the version that each alias of the model names, whoever set it.

        Read from the table: MLflow's lists come back without aliases.
        """
        from sqlalchemy import text

        query = text("SELECT alias, version FROM registered_model_aliases WHERE name = :name")
        with self._store.engine.connect() as connection:
            return {alias: str(version) for alias, version in connection.execute(query, {"name": self._name})}

    def delete(self, number: str) -> None:
        """Take a version out of the record; its number is not given again."""
        self._store.delete_model_version(self._name, number)

    def set_champion(self, number: str) -> None:
        """Move the champion alias in one transaction."""
        self.set_alias(CHAMPION, number)

    def set_alias(self, alias: str, number: str) -> None:
        """Move an alias in one transaction."""
        self._store.set_registered_model_alias(self._name, alias, number)

    def delete_alias(self, alias: str) -> None:
        """Take an alias away; the version stays."""
        self._store.delete_registered_model_alias(self._name, alias)

    def _exists(self) -> bool:
        try:
            self._store.get_registered_model(self._name)
        except Exception as error:
            if _error_code(error) == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True


@contextmanager
def open_record(database: Path, model_name: str) -> Iterator[ModelRecord]:
    """Open the record of one model in an existing database; its connections are closed at the end.

    Raises ArtifactError, naming the database, where it cannot be read or written.
    """
    with database.open("rb") as file:  # asked first, because MLflow retries for 100 seconds what it cannot open
        if file.read(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC:
            raise ArtifactError(f"{database}: not an sqlite database; restore it from a backup")
    store_class = _store_class()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        store = store_class(f"sqlite:///{database}")
        try:
            yield ModelRecord(store, model_name)
        finally:
            store.engine.dispose()
    except (MlflowException, SQLAlchemyError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"{database}: the record failed: {reason}; {remedy(database, reason)}") from error


def remedy(database: Path, reason: str) -> str:
    """What to do about an error of the record, by what the database says."""
    if "locked" in reason:
        return "another program holds it: wait for that to end, then repeat"
    if "disk" in reason:  # "disk I/O error", "database or disk is full"
        return "free space on that disk, then repeat"
    return f"where MLflow is newer than the database, run `mlflow db upgrade sqlite:///{database}`"
