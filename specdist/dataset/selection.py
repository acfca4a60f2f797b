"""Owns which rows become prompts: no duplicates, one side of the split each, spread over domains or mixed by weights.

Arrays run over rows. `hashes` are the first 64 bits of the hash of what a row says: every choice among rows goes by
them, so it is the same again when rows are added or moved. N rows, S sources.
"""

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from specdist.dataset.near_duplicates import repeats
from specdist.errors import ArtifactError

TRAIN, EVAL = range(2)
SIDES = ("train", "eval")
_SALT = b"specdist evaluation side "


class Fate(IntEnum):
    """What became of a row; the names are those of the manifest's `left_out`."""

    KEPT = 0
    EXACT_DUPLICATE = 1
    IN_EVALUATION = 2
    NEAR_DUPLICATE = 3
    NEAR_EVALUATION = 4
    NOT_CHOSEN = 5


class Selection:
    """The fate of every row; `sides` has TRAIN or EVAL for each."""

    def __init__(self, hashes: NDArray[np.uint64], sides: NDArray[np.int64]) -> None:
        self._hashes = hashes
        self._sides = sides
        self._fates = np.zeros(len(hashes), np.uint8)

    def kept(self, side: int) -> NDArray[np.int64]:
        """Numbers of the rows of a side that are kept so far."""
        return np.flatnonzero((self._sides == side) & (self._fates == Fate.KEPT))

    def left_out(self, side: int) -> dict[str, int]:
        """How many rows of a side had each fate but to be kept."""
        counts = np.bincount(self._fates[self._sides == side], minlength=len(Fate)).tolist()
        return {fate.name.lower(): counts[fate] for fate in Fate if fate != Fate.KEPT and counts[fate]}

    def drop_exact_duplicates(self) -> None:
        """Keep the first row of those on one side that say the same."""
        for side in (TRAIN, EVAL):
            rows = self.kept(side)
            firsts = np.unique(self._hashes[rows], return_index=True)[1]
            self._fates[np.delete(rows, firsts)] = Fate.EXACT_DUPLICATE

    def drop_shared(self) -> NDArray[np.int64]:
        """Drop the training rows that are evaluated on, too; their numbers."""
        rows = self.kept(TRAIN)
        shared = rows[np.isin(self._hashes[rows], self._hashes[self.kept(EVAL)])]
        self._fates[shared] = Fate.IN_EVALUATION
        return shared

    def drop_near_duplicates(self, signatures: NDArray[np.uint8], threshold: float, *, keep_evaluation: bool) -> None:
        """Drop rows that repeat another: evaluation comes before training, then the smallest hash comes first."""
        evaluation, training = (rows[np.argsort(self._hashes[rows])] for rows in (self.kept(EVAL), self.kept(TRAIN)))
        ranked = np.concatenate([evaluation, training])
        num_exempt = len(evaluation) if keep_evaluation else 0
        originals = repeats(signatures, ranked, threshold, num_exempt=num_exempt)
        later, earlier = ranked[originals >= 0], originals[originals >= 0]
        crosses = self._sides[later] != self._sides[earlier]
        self._fates[later] = np.where(crosses, Fate.NEAR_EVALUATION, Fate.NEAR_DUPLICATE)

    def take(self, side: int, chosen: NDArray[np.bool_]) -> None:
        """Keep only the chosen ones of the side's kept rows."""
        self._fates[self.kept(side)[~chosen]] = Fate.NOT_CHOSEN


def sides_by_hash(hashes: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.int64]:
    """EVAL where the SHA-256 of a salt and the hash, read as a share of all numbers, is below the fraction, else TRAIN.

    Only what a prompt says decides, so none changes sides when others are added.
    """
    end = int(eval_fraction * 2**64)
    digests = (hashlib.sha256(_SALT + b"%016x" % hash_).digest() for hash_ in hashes.tolist())
    return np.fromiter((EVAL if int.from_bytes(d[:8]) < end else TRAIN for d in digests), np.int64, len(hashes))


def spread(hashes: NDArray[np.uint64], domains: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Mask of `limit` rows taken from the domains in turn, each in the order of its hashes.

    `domains` are numbers in the order in which domains have their turn. A larger limit contains a smaller one.
    """
    order = np.lexsort((hashes, domains))
    turns = np.empty(len(order), np.int64)
    turns[order] = _places_in_runs(domains[order])
    chosen = np.zeros(len(order), bool)
    chosen[np.lexsort((domains, turns))[:limit]] = True
    return chosen


def mixture(
    hashes: NDArray[np.uint64], sources: NDArray[np.int64], weights: Sequence[float], limit: int | None
) -> NDArray[np.bool_]:
    """Mask of rows of which source i has the share weights[i] / Σ weights, the smallest hashes of each source.

    Their number is `limit`, or the largest that every source can provide its share of. Raises ArtifactError where that
    is none.
    """
    shares = np.asarray(weights, float) / sum(weights)
    available = np.bincount(sources, minlength=len(shares))
    largest = int((available / shares).min() + 1e-9)
    quotas = np.minimum(_apportion(shares, largest if limit is None else min(limit, largest)), available)
    if not quotas.any():
        raise ArtifactError(f"weights {list(weights)} of sources with {available.tolist()} prompts leave none to take")
    order = np.lexsort((hashes, sources))
    chosen = np.zeros(len(order), bool)
    chosen[order] = _places_in_runs(sources[order]) < quotas[sources[order]]
    return chosen


def _apportion(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers that add up to `total`, by largest remainders."""
    exact = shares * total
    counts = np.floor(exact + 1e-9).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return counts


def _places_in_runs(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2 … within each run of equal numbers."""
    places = np.arange(len(numbers))
    begins = np.ones(len(numbers), bool)
    begins[1:] = numbers[1:] != numbers[:-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0))
