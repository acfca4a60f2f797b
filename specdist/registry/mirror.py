"""Owns telling another MLflow, named by its URI, what a registry holds: a server that a team looks at.

    python -m specdist.registry.mirror ROOT MODEL URI

The record beside the versions (mlflow.py) alone decides what serves. The other one follows it, outside the registry's
lock and in a process of its own with a time limit: a server that refuses or hangs delays and damages no promotion, and
what it was not told it is told the next time (`specdist registry reconcile`).
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from filelock import FileLock, Timeout

from specdist.child_process import run_child
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.registry.mlflow import CHALLENGER, CHAMPION
from specdist.registry.store import Registry, check_writable
from specdist.registry.version import TAG_MANIFEST, Version

if TYPE_CHECKING:
    from mlflow import MlflowClient

URI_VARIABLE = "MLFLOW_TRACKING_URI"
SECONDS = 600.0  # weights are sent
_UPLOADED = ("http", "https")  # to others the directory's path is told, since they lie on this machine
_ON_DISK, _ELSEWHERE = ("", "file", "sqlite"), ("postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")
_VERSION = "specdist_version"  # the other MLflow gives numbers of its own
# A request that is not answered fails while the whole still has time
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def mirror_uri(configured: str | None = None) -> str | None:
    """The MLflow to tell: the one configured, else the environment's, else None."""
    return configured or os.environ.get(URI_VARIABLE) or None


def check_uri(uri: str) -> None:
    """Raise ConfigError where MLflow keeps no registry at such a URI, ArtifactError where one on disk is not writable.

    A server is not asked: it is told at the end, and may be started later.
    """
    address = urlparse(uri)
    scheme = address.scheme.split("+")[0]
    if scheme not in (*_UPLOADED, *_ON_DISK, *_ELSEWHERE):
        raise ConfigError(f"mlflow_tracking_uri {uri!r}: MLflow knows no {scheme}://; give http:// or sqlite:///…")
    if scheme in _ON_DISK:
        path = Path(unquote(address.path))
        check_writable(path.parent if scheme == "sqlite" else path)


def tell(registry: Registry, uri: str, *, seconds: float = SECONDS) -> str:
    """Bring the MLflow at `uri` up to date in at most `seconds`; returns why it could not be, "" where it is."""
    arguments = ["-m", "specdist.registry.mirror", str(registry.root), registry.model_name, uri]
    return run_child(arguments, "", seconds=seconds).fault


def mirror(registry: Registry, uri: str) -> None:
    """Record at `uri` each version with its tags, and the aliases. What is there already is not recorded again.

    A version is known there by the hash of its manifest. Raises ArtifactError where the server refuses.
    """
    for name, value in {**_LIMITS, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():  # MLflow's own, of its dependencies
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

    try:
        with FileLock(registry.root / ".mirror.lock", timeout=0):
            _mirror(registry, MlflowClient(tracking_uri=uri, registry_uri=uri), uri)
    except Timeout:
        raise ArtifactError(f"{uri}: another process is telling it; repeat when that has ended") from None
    except MlflowException as error:
        raise ArtifactError(f"{uri}: {str(error).splitlines()[0]}") from error


def _mirror(registry: Registry, client: "MlflowClient", uri: str) -> None:
    name = registry.model_name
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    known = {item.tags.get(TAG_MANIFEST): item.version for item in client.search_model_versions(f"name = '{name}'")}
    for version in registry.versions():
        manifest = version.tags[TAG_MANIFEST]
        if manifest not in known and version.path.is_dir():
            known[manifest] = _record(client, name, version, uri)
    for alias, named in ((CHAMPION, registry.champion()), (CHALLENGER, registry.challenger())):
        if named is not None:
            client.set_registered_model_alias(name, alias, str(known[named.tags[TAG_MANIFEST]]))
        else:
            client.delete_registered_model_alias(name, alias)


def _record(client: "MlflowClient", name: str, version: Version, uri: str) -> str:
    """Record one version; returns its number there."""
    tags = {**version.tags, _VERSION: version.number}
    if urlparse(uri).scheme not in _UPLOADED:
        return str(client.create_model_version(name, str(version.path), tags=tags).version)
    experiment = client.get_experiment_by_name(name)
    run = client.create_run(
        experiment.experiment_id if experiment else client.create_experiment(name),
        tags=tags,
        run_name=f"{name} version {version.number}",
    )
    client.log_artifacts(run.info.run_id, str(version.path), "drafter")
    client.set_terminated(run.info.run_id)
    source = f"{run.info.artifact_uri}/drafter"
    return str(client.create_model_version(name, source, run_id=run.info.run_id, tags=tags).version)


def main() -> int:
    """Tell the MLflow that the command line names; what fails is the last line on standard error."""
    root, model_name, uri = sys.argv[1:]
    try:
        mirror(Registry(Path(root), model_name), uri)
    except (SpecdistError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
