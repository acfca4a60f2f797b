"""Owns leaving secrets out of what others read: tokens and passwords, by the name of a setting or in an address.

A run's files may be read by whoever may read its results, and go with the drafter into registries. What is left out is
found in the environment (a login, a user of MLflow) where such a file is read again.
"""

import re
from collections.abc import Sequence
from typing import Any

_HIDDEN = "***"
_SECRET = re.compile(r"(?:^|_)(?:(?<!eos_)(?<!bos_)(?<!pad_)token|secret|password|(?:api|access)_?key)$")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")


def is_secret(name: str) -> bool:
    """Whether a setting or an option of this name holds a secret; `eos_token` is a word of a vocabulary."""
    return bool(_SECRET.search(name.lower().replace("-", "_")))


def without_credentials(text: str) -> str:
    """The text with "user:password@" taken out of every address in it."""
    return _USER_INFO.sub("", text)


def redacted(value: Any) -> Any:
    """Plain values without secrets: their keys are left out of mappings, credentials out of addresses."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items() if not is_secret(str(key))}
    return [redacted(item) for item in value] if isinstance(value, list) else value


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line in which secrets read "***" (`--hub_token X`, `--hub_token=X`) and addresses lose credentials."""
    shown: list[str] = []
    option = ""  # that the next argument may belong to
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not argument.startswith("-") and is_secret(option):
            argument = _HIDDEN
        elif equals and is_secret(name):
            argument = f"{name}={_HIDDEN}"
        option = argument if argument.startswith("-") else ""
        shown.append(without_credentials(argument))
    return shown
