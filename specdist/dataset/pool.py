"""Owns the rows of all sources while a PromptSet is made: their text in a file, in memory about 170 bytes of each.

A row that can be used is written to the file at once, as the line that a PromptSet has. In memory are its hash, labels
as numbers and its MinHash signature. N rows that can be used.
"""

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdist.dataset.conversation import BadRow, ParsedRow, parse_row
from specdist.dataset.near_duplicates import Signatures
from specdist.dataset.prompts import SourceRecord, prompt_line
from specdist.dataset.sources import Source
from specdist.errors import ArtifactError
from specdist.progress import track
from specdist.prompt_policy import PromptPolicy
from specdist.schema import Prompt

logger = logging.getLogger(__name__)

_SHOWN = 10  # bad rows spelt out; the rest are counted


class SourceCounts:
    """What was read from one source: rows, bad ones by kind and the first of them in words, repairs by name."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_rows = 0
        self.bad: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self._shown: list[str] = []

    def add_bad(self, number: int, error: BadRow) -> None:
        """Count a row that cannot be used."""
        self.bad[error.kind] += 1
        if len(self._shown) < _SHOWN:
            self._shown.append(f"  {self.source.unit} {number}, id {error.row_id}: {error}")

    def check(self, max_bad_share: float) -> None:
        """Log the bad rows. Raises ArtifactError, naming them, where they are too many or no other row is left."""
        num_bad = self.bad.total()
        if num_bad > max_bad_share * self.num_rows:
            remedy = f"max_bad_share lets {max_bad_share:.2%} pass; correct or remove them"
            raise ArtifactError(self._describe(f"cannot be used, {remedy}"))
        if num_bad == self.num_rows:
            reason = f"none of {self.num_rows} rows is a usable prompt; expected one JSON object a line"
            raise ArtifactError("\n".join([f"{self.source.name}: {reason}", *self._shown]))
        if num_bad:
            logger.warning("%s", self._describe("cannot be used and are dropped"))

    def record(self, num_prompts: int) -> SourceRecord:
        """The manifest's line on this source, of which `num_prompts` were taken."""
        return SourceRecord(self.source.name, self.source.sha256, self.num_rows, self.bad.total(), num_prompts)

    def _describe(self, verdict: str) -> str:
        num_bad = self.bad.total()
        lines = [f"{self.source.name}: {num_bad} of {self.num_rows} rows {verdict}", *self._shown]
        return "\n".join(lines if num_bad == len(self._shown) else [*lines, f"  and {num_bad - len(self._shown)} more"])


class Pool:
    """Rows that can be used, numbered in the order in which they were read."""

    def __init__(self, path: Path, policy: PromptPolicy, *, sign: bool) -> None:
        self.path = path
        self.counts: list[SourceCounts] = []
        self._policy = policy
        self._signatures = Signatures() if sign else None
        self._hashes, self._ids = array("Q"), array("Q")
        self._sources, self._domains, self._languages = array("H"), array("I"), array("I")
        self._domain_codes: dict[str, int] = {}
        self._language_codes: dict[str, int] = {}

    def read(self, sources: list[Source]) -> None:
        """Read all rows of all sources. Raises ArtifactError where too many rows of one are bad."""
        with self.path.open("wb") as file:
            for source in sources:
                counts = SourceCounts(source)
                self.counts.append(counts)
                for number, raw in track(source.rows(), source.num_rows, f"prompts of {source.name}", logger):
                    counts.num_rows += 1
                    try:
                        row = parse_row(raw, self._policy, source.domain)
                    except BadRow as error:
                        counts.add_bad(number, error)
                        continue
                    self._add(row, counts)
                    file.write(prompt_line(row.prompt) + b"\n")
                counts.check(self._policy.max_bad_share)

    def _add(self, row: ParsedRow, counts: SourceCounts) -> None:
        prompt, hash_ = row.prompt, int(row.digest, 16)
        self._hashes.append(hash_)
        is_hash = prompt.id == row.digest
        self._ids.append(hash_ if is_hash else int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:8]))
        self._sources.append(len(self.counts) - 1)
        self._domains.append(self._domain_codes.setdefault(prompt.domain, len(self._domain_codes)))
        self._languages.append(self._language_codes.setdefault(prompt.language, len(self._language_codes)))
        counts.actions.update(row.actions)
        if self._signatures is not None:
            self._signatures.add(prompt.messages)

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Hash of what each row says, [N]."""
        return np.frombuffer(self._hashes, np.uint64)

    @property
    def ids(self) -> NDArray[np.uint64]:
        """Hash of each row's id, [N]; that of what it says where the row named none."""
        return np.frombuffer(self._ids, np.uint64)

    @property
    def sources(self) -> NDArray[np.uint16]:
        """Number of each row's source, [N]."""
        return np.frombuffer(self._sources, np.uint16)

    @cached_property
    def domains(self) -> NDArray[np.int64]:
        """Number of each row's domain in alphabetical order, [N]."""
        order = np.argsort(np.array(list(self._domain_codes)))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks[np.frombuffer(self._domains, np.uintc)]

    @property
    def signatures(self) -> NDArray[np.uint8]:
        """MinHash signatures, [N, S]."""
        if self._signatures is None:
            raise ValueError("this pool was made without signatures")
        return self._signatures.array()

    def count_labels(self, rows: NDArray[np.int64]) -> tuple[dict[str, int], dict[str, int]]:
        """How many of `rows` have each domain and each language."""
        return (_count(self._domains, self._domain_codes, rows), _count(self._languages, self._language_codes, rows))

    def lines(self, rows: NDArray[np.int64]) -> Iterator[bytes]:
        """The lines of `rows`, ascending numbers, without their ends.

        Where a row's id is that of an earlier one of `rows`, the hash of what it says takes its place.
        """
        wanted = np.zeros(len(self), bool)
        wanted[rows] = True
        clashing = set(self._clashing(rows).tolist())
        with self.path.open("rb") as file:
            for row, line in zip(rows.tolist(), compress(file, wanted.tolist()), strict=True):
                line = line.removesuffix(b"\n")
                yield _with_id(line, f"{self._hashes[row]:016x}") if row in clashing else line

    def num_clashing(self, rows: NDArray[np.int64]) -> int:
        """How many of `rows` have the id of an earlier one of them."""
        return len(self._clashing(rows))

    def _clashing(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.delete(rows, np.unique(self.ids[rows], return_index=True)[1])


def _with_id(line: bytes, new_id: str) -> bytes:
    return prompt_line(Prompt(**{**json.loads(line), "id": new_id}))


def _count(codes: "array[int]", names: dict[str, int], rows: NDArray[np.int64]) -> dict[str, int]:
    counts = np.bincount(np.frombuffer(codes, np.uintc)[rows], minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count}
