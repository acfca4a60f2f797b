"""Owns reading a recipe's configuration: the YAML file and the command line, into the dataclasses of config.py.

A value comes from the command line, else from the YAML file, else from the field's default. An unknown key is an error
that suggests the nearest.
"""

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from trl import TrlParser

from specdist.config import (
    DataArguments,
    EvaluationArguments,
    PromptArguments,
    RecipeConfig,
    ReleaseArguments,
    TargetArguments,
)
from specdist.errors import ConfigError
from specdist.objective import ObjectiveArguments

_OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}  # before transformers 5.20, which vLLM 0.32 pins


def _split_config(arguments: Sequence[str], default: str) -> tuple[Path, list[str]]:
    """Take `--config PATH` (or `--config=PATH`) out of the arguments."""
    rest, path, items = [], default, iter(arguments)
    for item in items:
        if item == "--config":
            path = next(items, "")
        elif item.startswith("--config="):
            path = item.removeprefix("--config=")
        else:
            rest.append(item)
    if not path or not Path(path).is_file():
        raise ConfigError(f"--config {path!r}: no such file; run from the repository's root, or see recipes/configs/")
    return Path(path), rest


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    return values


def _check_keys(keys: Sequence[str], known: set[str], where: str) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "; see recipes/configs/ for the keys there are"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _item(key: str, value: Any, kind: Any) -> Any:
    """One value as `kind` has it: YAML reads 1e-4 as text and 1 as a whole number. Raises ConfigError on another."""
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, TypeError):
            raise ConfigError(f"{key} = {value!r}: expected a number") from None
    if kind in (int, str) and type(value) is not kind:
        raise ConfigError(f"{key}: holds {value!r}, expected {'whole numbers' if kind is int else 'text'} in the list")
    return value


def _as_typed(key: str, value: Any, hint: Any) -> Any:
    """A value of the YAML file as its field's type has it; a list's only item may stand alone."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    if value is None or str in kinds:
        return value
    if lists := [kind for kind in kinds if get_origin(kind) is list]:
        return [_item(key, item, get_args(lists[0])[0]) for item in (value if isinstance(value, list) else [value])]
    return _item(key, value, float) if float in kinds else value


def _from_yaml(path: Path, types: Sequence[type], known: set[str]) -> dict[str, Any]:
    values = _with_old_names(_read_yaml(path), known)
    _check_keys(list(values), known, str(path))
    hints = {key: hint for t in types for key, hint in get_type_hints(t).items()}
    return {key: _as_typed(key, value, hints[key]) for key, value in values.items()}


def _with_old_names(values: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Keys that the installed transformers does not know yet, under the name that it knows them by."""
    return {key if key in known else _OLD_NAMES.get(key, key): value for key, value in values.items()}


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"command line: {message}")


def parse(
    model_arguments: type, training_arguments: type, *, default_config: str, arguments: Sequence[str] | None = None
) -> RecipeConfig:
    """Read the YAML file and the command line into a RecipeConfig.

    Raises ConfigError on an unknown key (with the nearest known one), on a value out of range and on a wrong type.
    """
    path, rest = _split_config(list(sys.argv[1:] if arguments is None else arguments), default_config)
    types: list[Any] = [
        TargetArguments,
        PromptArguments,
        DataArguments,
        ObjectiveArguments,
        model_arguments,
        EvaluationArguments,
        ReleaseArguments,
        training_arguments,
    ]
    known = {f.name for t in types for f in dataclasses.fields(t) if f.init}
    on_command_line = [item[2:].split("=")[0].replace("-", "_") for item in rest if item.startswith("--")]
    from_file = _from_yaml(path, types, known)
    _check_keys(on_command_line, known, "command line")
    parser = TrlParser(types, allow_abbrev=False)
    defaults = {
        # Without an accelerator the trainer wants to be told so before it allows bf16
        "use_cpu": not torch.accelerator.is_available(),
        # TRL's own default still goes by the old name of this key, which warns
        "activation_checkpointing": bool(getattr(training_arguments, "gradient_checkpointing", False)),
    }
    parser.set_defaults_with_config(**_with_old_names(defaults, known) | from_file)
    parser.error = _refuse  # type: ignore[method-assign] # in place of argparse's own, which buries the reason under the usage of 300 keys
    try:
        *ours, training = parser.parse_args_into_dataclasses(args=rest)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    given = {key: None for key in [*from_file, *on_command_line]}
    return RecipeConfig(ours[0], ours[1], ours[2], ours[3], ours[4], ours[5], ours[6], training, given)
