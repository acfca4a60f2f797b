"""Owns making PromptSets from sources: read, validate, remove duplicates, split, mix, write; once for the same inputs.

The text of rows stays on disk; memory is about 170 bytes for each (pool.py).
"""

import hashlib
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from specdist.dataset.near_duplicates import check_threshold
from specdist.dataset.pool import Pool
from specdist.dataset.prompts import PromptManifest, PromptSet, lines_sha256
from specdist.dataset.selection import EVAL, SIDES, TRAIN, Selection, mixture, sides_by_hash, spread
from specdist.dataset.sources import Source, open_source
from specdist.errors import ArtifactError, ConfigError
from specdist.prompt_policy import PromptPolicy
from specdist.provenance import atomic_directory, sha256_file, sha256_json, write_json

logger = logging.getLogger(__name__)

_RULES_VERSION = 1  # raise it when the same sources and rules would give other prompts
_USES = ("train on", "evaluate with")
_SPLIT_RULES = ("sources of their own", "eval: SHA-256 of salt and prompt hash below eval_fraction; train: all others")


@dataclass(frozen=True)
class PromptMix:
    """Sources, and how much of each: all of every one, or shares by `weights`; at most `limit` prompts in all.

    `domains` label the rows that name none, one for each source. Without weights a limit takes prompts from the domains
    in turn.
    """

    sources: Sequence[str]
    weights: Sequence[float] = ()
    limit: int | None = None
    domains: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, values in (("weights", self.weights), ("domains", self.domains)):
            if values and len(values) != len(self.sources):
                raise ConfigError(
                    f"{len(values)} {name} for {len(self.sources)} sources: expected one for each, or none"
                )
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError(
                f"weights {list(self.weights)}: expected numbers above 0; leave a source out to take none"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit}: expected 1 or more prompts")


def prepare_prompts(
    train: PromptMix,
    evaluation: PromptMix,
    *,
    directory: Path,
    policy: PromptPolicy | None = None,
    near_duplicate_threshold: float = 0.8,
    eval_fraction: float = 0.05,
) -> tuple[PromptSet, PromptSet]:
    """The PromptSets to train on and to evaluate with: directory/<fingerprint>/{train,eval}.

    Where `evaluation` names no sources, the prompts of `train` whose hash says so are held out, about `eval_fraction`
    of them. A threshold of 0 keeps near-duplicates; those within given evaluation sources are kept anyway. What was
    made from the same inputs before is opened again.
    Raises ArtifactError where a source is missing, too many of its rows are bad (with line, id and reason), a prompt is
    in the sources of both sides, or none is left on one.
    """
    job = _Job(train, evaluation, policy or PromptPolicy(), near_duplicate_threshold, eval_fraction)
    sources = [_open(mix) for mix in (train, evaluation)]
    fingerprint = sha256_json({"rules": job.rules(), "sources": [[(s.sha256, s.domain) for s in o] for o in sources]})
    result = directory / fingerprint[:12]
    if not _is_finished(result):
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(result.with_suffix(".lock")):
            if not _is_finished(result):
                for leftover in directory.glob(f".tmp-*-{result.name}"):
                    shutil.rmtree(leftover)
                _make(result, job, *sources)
    return PromptSet.open(result / SIDES[TRAIN]), PromptSet.open(result / SIDES[EVAL])


def _open(mix: PromptMix) -> list[Source]:
    domains = mix.domains or [""] * len(mix.sources)
    return [open_source(name, domain or None) for name, domain in zip(mix.sources, domains, strict=True)]


def _is_finished(result: Path) -> bool:
    return all((result / side / "manifest.json").exists() for side in SIDES)


@dataclass(frozen=True)
class _Job:
    """What is asked for, beside the sources' content."""

    train: PromptMix
    evaluation: PromptMix
    policy: PromptPolicy
    near_duplicate_threshold: float
    eval_fraction: float

    def __post_init__(self) -> None:
        check_threshold(self.near_duplicate_threshold)
        if not self.train.sources:
            raise ConfigError("no training sources: expected at least one")
        if self.holds_out and not 0.0 < self.eval_fraction < 1.0:
            raise ConfigError(
                f"eval_fraction = {self.eval_fraction}: expected between 0 and 1 where evaluation has no sources"
            )

    @property
    def holds_out(self) -> bool:
        """Whether evaluation takes its prompts from the training sources."""
        return not self.evaluation.sources

    def limit(self, side: int) -> int | None:
        return (self.train, self.evaluation)[side].limit

    def weights(self, side: int) -> Sequence[float]:
        """What is held out is mixed as training is."""
        return self.train.weights if side == TRAIN or self.holds_out else self.evaluation.weights

    def rules(self) -> dict[str, Any]:
        """Everything that decides, as plain values."""
        return {
            "version": _RULES_VERSION,
            **asdict(self.policy),
            "near_duplicate_threshold": self.near_duplicate_threshold,
            "eval_fraction": self.eval_fraction if self.holds_out else None,
            "weights": {name: list(self.weights(side)) for side, name in enumerate(SIDES)},
            "limits": {name: self.limit(side) for side, name in enumerate(SIDES)},
        }


def _make(result: Path, job: _Job, train: list[Source], evaluation: list[Source]) -> None:
    """Read the sources and write both PromptSets."""
    with atomic_directory(result) as temporary:
        pool = Pool(temporary / "pool.jsonl", job.policy, sign=job.near_duplicate_threshold > 0)
        began = time.monotonic()
        pool.read([*train, *evaluation])
        read = time.monotonic()
        selection = _select(pool, job, num_train_sources=len(train))
        selected = time.monotonic()
        numbers = range(len(pool.counts))
        for side, name in enumerate(SIDES):
            own = numbers if job.holds_out else (numbers[: len(train)], numbers[len(train) :])[side]
            _write(temporary / name, pool, selection, side, own, job.rules())
        pool.path.unlink()
        seconds = (read - began, selected - read, time.monotonic() - selected)
        logger.info("prompts  read in %.1f s, selected in %.1f s, written in %.1f s", *seconds)


def _select(pool: Pool, job: _Job, *, num_train_sources: int) -> Selection:
    if job.holds_out:
        sides = sides_by_hash(pool.hashes, job.eval_fraction)
    else:
        sides = np.where(pool.sources < num_train_sources, TRAIN, EVAL)
    selection = Selection(pool.hashes, sides)
    selection.drop_exact_duplicates()
    shared = selection.drop_shared()
    if len(shared) and job.policy.shared_prompts == "reject":
        raise ArtifactError(
            f"{len(shared)} prompts are in both {', '.join(job.train.sources)} and {', '.join(job.evaluation.sources)}"
            f", for example {pool.hashes[shared].min():016x}; evaluation needs prompts that were not trained on: "
            "remove them from the training sources, or set shared_prompts to drop"
        )
    if job.near_duplicate_threshold > 0:
        # evaluation sources are a benchmark that others measure with, too: their near-duplicates belong to it
        selection.drop_near_duplicates(pool.signatures, job.near_duplicate_threshold, keep_evaluation=not job.holds_out)
    for side in (TRAIN, EVAL):
        first_source = 0 if side == TRAIN or job.holds_out else num_train_sources
        selection.take(side, _chosen(pool, selection.kept(side), first_source, job.weights(side), job.limit(side)))
    return selection


def _chosen(
    pool: Pool, rows: NDArray[np.int64], first_source: int, weights: Sequence[float], limit: int | None
) -> NDArray[np.bool_]:
    """Mask of `rows`: those that the mixture takes."""
    if weights:
        return mixture(pool.hashes[rows], pool.sources[rows].astype(np.int64) - first_source, weights, limit)
    if limit is not None:
        return spread(pool.hashes[rows], pool.domains[rows], limit)
    return np.ones(len(rows), bool)


def _write(directory: Path, pool: Pool, selection: Selection, side: int, sources: range, rules: dict[str, Any]) -> None:
    """Write a side's PromptSet: its prompts in the order in which they were read, then its manifest."""
    rows, read = selection.kept(side), [pool.counts[i] for i in sources]
    num_rows, bad = sum(counts.num_rows for counts in read), _sum(counts.bad for counts in read)
    left_out = Counter({"bad": bad.total(), **selection.left_out(side)})
    left_out["other_side"] = num_rows - len(rows) - left_out.total()
    if not len(rows):
        raise ArtifactError(f"no prompt is left to {_USES[side]}: {num_rows} rows read, left out {dict(+left_out)}")
    directory.mkdir()
    file, digests = directory / "prompts.jsonl", bytearray()
    with file.open("wb") as output:
        for line in pool.lines(rows):
            digests += hashlib.sha256(line).digest()
            output.write(line + b"\n")
    num_taken = np.bincount(pool.sources[rows], minlength=len(pool.counts)).tolist()
    domains, languages = pool.count_labels(rows)
    manifest = PromptManifest(
        num_prompts=len(rows),
        prompts_sha256=sha256_file(file),
        content_sha256=lines_sha256(digests),
        domains=domains,
        languages=languages,
        split={"side": SIDES[side], "rule": _SPLIT_RULES[rules["eval_fraction"] is not None]},
        sources=[pool.counts[i].record(num_taken[i]) for i in sources],
        rules=rules,
        num_rows=num_rows,
        left_out=dict(+left_out),
        bad=dict(bad),
        policy_actions=dict(_sum(counts.actions for counts in read) + Counter(id_replaced=pool.num_clashing(rows))),
    )
    write_json(directory / "manifest.json", manifest.to_json())
    logger.info(
        "prompts  %s: %d of %d rows, left out %s", SIDES[side], len(rows), num_rows, manifest.left_out or "none"
    )


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())
