"""Owns how a person names a version of a registry: MODEL@N, or MODEL alone for its champion."""

from pathlib import Path

from specdist.errors import ArtifactError
from specdist.registry.store import Registry, model_names


def named_version(name: str, root: Path, wanted: str) -> Path:
    """The directory of the version that `name` means in the registry at `root`.

    Raises ArtifactError where there is none; `wanted` is the file that was looked for at the path `name` before.
    """
    model, _, number = name.partition("@")
    if not root.is_dir() or model not in (models := model_names(root)):
        known = f"; {root} has the models {models}" if root.is_dir() else f"; there is no registry at {root}"
        raise ArtifactError(f"{name}: no {wanted}, no directory with one, and no MODEL[@N] of a registry{known}")
    registry = Registry(root, model)
    version = registry.get(number) if number else registry.champion()
    if version is None:
        raise ArtifactError(f"{name}: {model} has no champion yet; name a version, {model}@N")
    return version.path
