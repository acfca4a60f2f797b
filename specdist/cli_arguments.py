"""Owns how the words of a command line are read: each function checks one, before any work, and says what it wants."""

import argparse
import math
from pathlib import Path

_HIGHEST = 2**63 - 1  # of the seeds that torch takes


def text(word: str) -> str:
    """UTF-8, which tokenizers take alone."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{word!r}: not UTF-8; expected text in UTF-8") from None
    return word


def some_text(word: str) -> str:
    """Text that is not empty."""
    if not word:
        raise argparse.ArgumentTypeError("'': expected one character or more")
    return text(word)


def count(word: str) -> int:
    """A whole number, 0 or more."""
    if not (word.isdecimal() and int(word) <= _HIGHEST):
        raise argparse.ArgumentTypeError(f"{word!r}: expected a whole number, 0 to {_HIGHEST}")
    return int(word)


def seconds(word: str) -> float:
    """A time, more than 0."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r}: expected a number of seconds, more than 0")
    return value


def new_file(word: str) -> Path:
    """Where a file will be written, over one that is there; no directory."""
    if Path(word).is_dir():
        raise argparse.ArgumentTypeError(f"{word!r}: is a directory; expected the name of a file")
    return Path(word)
