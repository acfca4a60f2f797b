"""Owns the commands `specdist registry …`: published versions, and the champion that serves."""

import argparse
import sys
from pathlib import Path

from specdist.errors import ArtifactError
from specdist.redaction import without_credentials
from specdist.registry.store import Registry, model_names
from specdist.registry.version import TAG_CREATED, TAG_MEAN_ACCEPTED_LENGTH

_COLUMNS = ("model", "version", "alias", "mean accepted length", "created")


def write_line(line: str) -> None:
    """A line of a command's answer."""
    sys.stdout.write(f"{line}\n")


def add_registry_commands(registry: argparse.ArgumentParser) -> None:
    """What can be asked of a registry."""
    commands = registry.add_subparsers(required=True, metavar="COMMAND")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--root", type=Path, default=Path("runs/registry"), help="the registry (default: %(default)s)")
    model = argparse.ArgumentParser(add_help=False, parents=[shared])
    model.add_argument("model", metavar="MODEL")

    command = commands.add_parser(
        "list", parents=[shared], help="all models and versions; * marks the champion, which serves"
    )
    command.set_defaults(run=_list)
    command = commands.add_parser("show", parents=[model], help="one version, its tags; its files are verified")
    command.add_argument("version", metavar="VERSION", nargs="?", help="default: the champion")
    command.set_defaults(run=_show)
    command = commands.add_parser("path", parents=[model], help="path of the champion link, to give to an engine")
    command.set_defaults(run=_path)
    command = commands.add_parser("rollback", parents=[model], help="make an earlier champion champion again")
    command.add_argument("--to", metavar="N", help="version (default: the champion before the present one)")
    _add_mirror(command)
    command.set_defaults(run=_rollback)
    command = commands.add_parser("prune", parents=[model], help="delete old versions that no alias names")
    command.add_argument(
        "--keep", metavar="N", type=int, default=5, help="newest versions to keep (default: %(default)s)"
    )
    command.set_defaults(run=_prune)
    command = commands.add_parser("reconcile", parents=[model], help="finish what an interrupted writer left")
    _add_mirror(command)
    command.set_defaults(run=_reconcile)


def _add_mirror(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mlflow-tracking-uri", metavar="URI", help="an MLflow to be told (default: environment's)")


def _open(arguments: argparse.Namespace) -> Registry:
    registry = Registry(arguments.root, arguments.model)
    if arguments.model not in (names := model_names(arguments.root)):
        raise ArtifactError(f"{arguments.root}: no model {arguments.model!r}; there are {names}")
    return registry


def _list(arguments: argparse.Namespace) -> None:
    rows, errors = [_COLUMNS], []
    for name in model_names(arguments.root):
        registry = Registry(arguments.root, name)
        champion, challenger = None, registry.challenger()
        try:
            champion = registry.champion()
        except ArtifactError as error:
            errors.append(str(error))
        for version in registry.versions():
            mark = "" if version.path.is_dir() else "(missing)"
            mark = "* champion" if version == champion else "challenger" if version == challenger else mark
            length, created = (version.tags.get(key, "") for key in (TAG_MEAN_ACCEPTED_LENGTH, TAG_CREATED))
            rows.append((name, version.number, mark, length, created))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if errors:
        raise ArtifactError("\n".join(errors))


def _show(arguments: argparse.Namespace) -> None:
    registry = _open(arguments)
    version = registry.get(arguments.version) if arguments.version else registry.champion()
    if version is None:
        raise ArtifactError(f"{arguments.model}: no champion yet; name a version")
    moves = [f"{entry['action']} {entry['time']}" for entry in registry.history() if entry["version"] == version.number]
    fields = {"model": arguments.model, "version": version.number, "path": str(version.path), **version.tags}
    if moves:
        fields["became champion"] = ", ".join(moves)
    width = max(map(len, fields))
    for key, value in fields.items():
        write_line(f"{key.ljust(width)}  {value}")
    registry.verify(version)
    write_line(f"{'files'.ljust(width)}  as published")


def _path(arguments: argparse.Namespace) -> None:
    write_line(str(Registry(arguments.root, arguments.model).champion_path()))


def _rollback(arguments: argparse.Namespace) -> None:
    version = _open(arguments).rollback(arguments.to)
    write_line(f"champion of {arguments.model} is now version {version.number}; a running server must be restarted")
    _tell_mlflow(arguments)


def _prune(arguments: argparse.Namespace) -> None:
    deleted = _open(arguments).prune(arguments.keep)
    write_line(f"{arguments.model}: deleted {', '.join(deleted) or 'nothing'}")


def _reconcile(arguments: argparse.Namespace) -> None:
    registry = _open(arguments)
    registry.reconcile()
    champion = registry.champion()
    write_line(f"{arguments.model}: in order, champion {champion.number if champion else 'none'}")
    _tell_mlflow(arguments)


def _tell_mlflow(arguments: argparse.Namespace) -> None:
    """Raises ArtifactError where an MLflow is named and cannot be told; what serves is as it was said before."""
    from specdist.registry.mirror import mirror_uri, tell

    if uri := mirror_uri(arguments.mlflow_tracking_uri):
        shown = without_credentials(uri)
        if fault := without_credentials(tell(_open(arguments), uri)):
            raise ArtifactError(f"MLflow at {shown} was not told: {fault}; `specdist registry reconcile` tells it")
        write_line(f"{arguments.model}: MLflow at {shown} is up to date")
