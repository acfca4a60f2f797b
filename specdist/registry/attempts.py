"""Owns the count of drafters that each set of evaluation prompts has judged, kept beside a model's versions.

A set that judges many drafters is no longer sealed: the best of many looks better than it is. So every one is counted,
whatever its verdict, and a drafter that is judged again is counted once.
"""

import json

from filelock import FileLock, Timeout

from specdist.errors import ArtifactError
from specdist.provenance import write_text
from specdist.registry.history import now
from specdist.registry.store import Registry

_LOCK_SECONDS = 600.0


def count_attempt(registry: Registry, *, eval_prompts_sha256: str, drafter_sha256: str) -> int:
    """Note that these prompts judge this drafter; returns how many drafters they have judged, this one included.

    Raises ArtifactError where the count cannot be read or written.
    """
    file = registry.directory / "attempts.jsonl"
    try:
        registry.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            known = {
                entry["drafter_sha256"]
                for entry in map(json.loads, lines)
                if entry["eval_prompts_sha256"] == eval_prompts_sha256
            }
            if drafter_sha256 not in known:
                entry = {
                    "time": now(),
                    "eval_prompts_sha256": eval_prompts_sha256,
                    "drafter_sha256": drafter_sha256,
                }
                # Written whole: a kill could cut an appended line.
                write_text(file, "".join(f"{line}\n" for line in [*lines, json.dumps(entry, sort_keys=True)]))
            return len(known | {drafter_sha256})
    except (OSError, ValueError, KeyError, TypeError, Timeout) as error:
        raise ArtifactError(f"{file}: attempts cannot be counted ({error!r}); restore it, or free its lock") from error
