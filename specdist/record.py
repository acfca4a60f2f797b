"""Owns what all records share: frozen dataclasses of plain values, checked when they are read from JSON.

`to_json` and `from_json` are strict inverses: a missing or an unknown key is an ArtifactError. No tensors and no I/O.
"""

import dataclasses
import types
import typing
from typing import Any, Self

from specdist.errors import ArtifactError

SCHEMA_VERSION = 1


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON `value` into the annotated type `kind`, or raise ArtifactError naming `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(arg for arg in args if arg is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise ArtifactError(f"{where}: expected a list, got {type(value).__name__}")
        items = [_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise ArtifactError(f"{where}: expected a mapping, got {type(value).__name__}")
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not Any and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ArtifactError(f"{where}: expected {kind.__name__}, got {type(value).__name__} ({value!r})")
    return value


def _decode_record(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ArtifactError(f"{where}: expected a mapping, got {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    names = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(value) - set(names)):
        raise ArtifactError(f"{where}: unknown keys {unknown}; expected {sorted(names)}")
    required = {
        n for n, f in names.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(value)):
        raise ArtifactError(f"{where}: missing keys {missing}; the file is incomplete or of another version")
    return kind(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})


class Record:
    """Mixin of every record: `to_json` gives plain values, `from_json` checks and restores them."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary with a `schema_version`."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: Any, where: str = "record") -> Self:
        """Inverse of `to_json`. `where` (a path, say) starts each error message.

        Raises ArtifactError on another schema version and on missing, unknown or wrongly typed keys.
        """
        if not isinstance(data, dict):
            raise ArtifactError(f"{where}: expected a mapping, got {type(data).__name__}")
        data = dict(data)
        if (version := data.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ArtifactError(f"{where}: schema_version {version!r}, this specdist reads {SCHEMA_VERSION}")
        return _decode_record(cls, data, where)
