"""Owns the record of an export that was read twice: by the process that measured it, and by a fresh one.

It is part of an evaluation report (schema.py). A tensor that the files lack is initialised as each process likes, and
what only lived in memory is gone: both make the two readings differ.
"""

from dataclasses import dataclass

from specdist.record import Record


@dataclass(frozen=True)
class ExportReading(Record):
    """What one process read of an export: its tensors as they were loaded, and what it drafts with them.

    `tensors_sha256`: hash over name, dtype, shape and bytes of each; `drafts`: the tokens of each block, drafted
    greedily on the same prompts, one prompt after the other.
    """

    num_tensors: int
    tensors_sha256: str
    drafts: list[list[int]]


@dataclass(frozen=True)
class Reload(Record):
    """Both readings. `fresh` None: the fresh process could not read the export, and `fault` says why."""

    measured: ExportReading
    fresh: ExportReading | None = None
    fault: str = ""
