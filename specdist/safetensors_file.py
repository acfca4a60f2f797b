"""Owns the header of a safetensors file: what tensors it says it holds, and that it holds their bytes and no others.

The format: the header's length (8 bytes, little-endian), the header as JSON, the tensors' bytes one after the other
(https://github.com/huggingface/safetensors, "Format").
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from specdist.errors import ArtifactError

_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the format's own limit


def read_header(path: Path, remedy: str = "export again") -> dict[str, str]:
    """What each tensor of a file is, by its name, such as "F32 [268, 32]". No tensor is read.

    Raises ArtifactError, naming the file and the `remedy`, where it is missing, truncated, padded, or no safetensors
    file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= size and length <= _MAX_HEADER else b""
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); {remedy}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        tensors = {name: f"{entry['dtype']} {list(entry['shape'])}" for name, entry in header.items()}
        wrong = [name for name, entry in header.items() if not _fits(entry)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: no safetensors file, or its header is cut ({size} bytes); {remedy}") from error
    expected = 8 + length + max((end for _, end in ends), default=0)
    if size != expected:
        kind = "truncated" if size < expected else "padded"
        raise ArtifactError(f"{path}: {kind}: {size} bytes, its header asks for {expected}; {remedy}")
    if wrong or any(start != end for (_, end), (start, _) in pairwise([(0, 0), *ends])):
        raise ArtifactError(f"{path}: its header contradicts itself at {sorted(wrong)[:4] or 'its offsets'}; {remedy}")
    return tensors


def _fits(entry: Mapping[str, Any]) -> bool:
    start, end = entry["data_offsets"]
    return bool(end - start == prod(entry["shape"]) * _BYTES[entry["dtype"]])


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """How tensors differ from those that were expected, in words; empty where they do not."""
    lines = []
    if missing := sorted(expected.keys() - found.keys()):
        lines.append(f"tensors missing: {missing[:4]}")
    if unknown := sorted(found.keys() - expected.keys()):
        lines.append(f"unknown tensors: {unknown[:4]}")
    changed = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    lines += [f"tensor {name} is {found[name]}, expected {expected[name]}" for name in changed[:2]]
    return lines
