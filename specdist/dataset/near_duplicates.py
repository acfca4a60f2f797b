"""Owns near-duplicates: shingles of a conversation, its MinHash signature, and the rows that repeat an earlier one.

Two conversations are compared by the Jaccard similarity of their shingles: runs of 5 units, where a unit is a word, a
sign, or one character of a script that writes no spaces. A signature keeps the lowest 8 bits of each of 128 minima
(b-bit MinHash, Li and König 2010), so a million rows take 128 MB. N rows, S = 128 slots.
"""

import re
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from specdist.errors import ConfigError
from specdist.provenance import sha256_bytes

SLOTS = 128
MIN_THRESHOLD = 0.5  # below it the bands get so short that unrelated rows meet in them
_SEED = 1
_SHINGLE = 5
_BATCH = 65_536  # shingles held until their rows are signed
_PAIRS = 65_536  # pairs compared at a time
_ROUNDS = 32  # a band of one template's rows has few distinct ones; the other bands catch what is left
_RECALL = 0.98
# Thai and Lao, Burmese, Khmer, kana, Han
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_ASCII_UNIT = re.compile(r"\w+|[^\w\s]", re.ASCII)
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def _units(text: str) -> list[str]:
    if text.isascii():
        return _ASCII_UNIT.findall(text.lower())
    return _UNIT.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles(messages: list[dict[str, str]]) -> list[str]:
    """Runs of 5 units of the turns. Rows with other system turns share none; those with the same differ by the rest."""
    turns = messages
    tag = ""
    if messages[0]["role"] == "system":
        tag, turns = sha256_bytes(messages[0]["content"].encode())[:16] + " ", messages[1:]
    units = _units("\n".join([turn["content"] for turn in turns]))
    runs = map(" ".join, zip(*(units[i:] for i in range(_SHINGLE)), strict=False))
    if len(units) < _SHINGLE:
        runs = map(" ".join, [units])
    return [tag + run for run in runs] if tag else list(runs)


class Signatures:
    """Signatures of conversations in the order in which they are added."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._waiting: list[list[str]] = []
        self._num_waiting = 0

    def add(self, messages: list[dict[str, str]]) -> None:
        """Sign one more conversation."""
        self._waiting.append(shingles(messages))
        self._num_waiting += len(self._waiting[-1])
        if self._num_waiting >= _BATCH:
            self._sign()

    def _sign(self) -> None:
        if self._waiting:
            minima = RMinHash.digests_from_token_sets(self._waiting, SLOTS, _SEED)
            self._data += (np.array(minima, np.uint32) & 0xFF).astype(np.uint8).tobytes()
            self._waiting, self._num_waiting = [], 0

    def array(self) -> NDArray[np.uint8]:
        """All signatures, [N, S]."""
        self._sign()
        return np.frombuffer(self._data, np.uint8).reshape(-1, SLOTS)


def check_threshold(threshold: float) -> None:
    """Raise ConfigError unless `threshold` is 0 (off) or a similarity that can be looked for."""
    if threshold != 0 and not MIN_THRESHOLD <= threshold <= 1.0:
        raise ConfigError(f"near_duplicate_threshold = {threshold}: expected {MIN_THRESHOLD:g} to 1, or 0 for off")


def repeats(
    signatures: NDArray[np.uint8], ranked: NDArray[np.int64], threshold: float, *, num_exempt: int = 0
) -> NDArray[np.int64]:
    """For each of the rows `ranked`, best first, a row before it that is at least `threshold` similar, or -1.

    Rows meet where a band of their signatures agrees (98 % of the pairs at the threshold do) and are compared by the
    share of equal slots, corrected for those that are equal by chance. The first `num_exempt` repeat nothing.
    """
    check_threshold(threshold)
    keeper = np.full(len(ranked), -1, np.int64)
    width = _band_width(threshold)
    for start in range(0, SLOTS - width + 1, width):
        alive = np.flatnonzero(keeper < 0)
        rows = ranked[alive]
        keys = _band_keys(signatures, rows, slice(start, start + width))
        own_exempt = int(np.searchsorted(alive, num_exempt))
        for later, earlier in _repeats_in_band(signatures, rows, keys, threshold, own_exempt):
            keeper[alive[later]] = rows[earlier]
    return keeper


def _band_width(threshold: float) -> int:
    """Slots of a band, 8 at most: as many as find 98 % of the pairs at the threshold (1 − (1 − tʷ)^(S/w))."""
    widths = range(8, 0, -1)
    return next((w for w in widths if 1 - (1 - threshold**w) ** (SLOTS // w) >= _RECALL), 1)


def _band_keys(signatures: NDArray[np.uint8], rows: NDArray[np.int64], band: slice) -> NDArray[np.uint64]:
    """The slots of a band as one number per row, [len(rows)]."""
    keys = np.zeros((len(rows), 8), np.uint8)
    keys[:, : band.stop - band.start] = signatures[:, band][rows]
    return keys.view("<u8").ravel()


def _repeats_in_band(
    signatures: NDArray[np.uint8],
    rows: NDArray[np.int64],
    keys: NDArray[np.uint64],
    threshold: float,
    num_exempt: int,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Positions in `rows` of repeats and of what they repeat.

    In each round the first of every group of equal keys takes those that repeat it; the others form a group again.
    """
    members = np.argsort(keys, kind="stable")
    for _ in range(_ROUNDS):
        group = keys[members]
        is_first = np.ones(len(members), bool)
        is_first[1:] = group[1:] != group[:-1]
        if is_first.all():
            return
        firsts = members[np.maximum.accumulate(np.where(is_first, np.arange(len(members)), 0))]
        later, earlier = members[~is_first], firsts[~is_first]
        same = (later >= num_exempt) & (_agreement(signatures, rows[later], rows[earlier]) >= threshold)
        yield later[same], earlier[same]
        members = later[~same]


def _agreement(signatures: NDArray[np.uint8], a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimated Jaccard similarity of rows `a` and `b`. Two slots of 8 bits agree by chance once in 256."""
    shares = np.empty(len(a))
    for start in range(0, len(a), _PAIRS):
        part = slice(start, start + _PAIRS)
        shares[part] = (signatures[a[part]] == signatures[b[part]]).mean(axis=1)
    return (shares - 1 / 256) / (1 - 1 / 256)
