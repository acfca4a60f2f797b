"""Owns the progress of writing a dataset over all its processes: one small file each, which the first one sums up."""

import json
import logging
import time
from pathlib import Path

from specdist.progress import INTERVAL_SECONDS, format_seconds

logger = logging.getLogger(__name__)


class Throughput:
    """Counts this process's tokens and conversations, and logs those of all processes about every ten seconds."""

    def __init__(self, directory: Path, rank: int, world_size: int, num_units: int) -> None:
        """`num_units`: conversations that all processes have to finish."""
        self.rank, self.num_units, self._directory = rank, num_units, directory
        self._files = [directory / f"progress-{k}.json" for k in range(world_size)]
        self._tokens = self._units = 0
        self._began = self._shared = time.monotonic()
        self._share()

    def _share(self) -> None:
        state = {"tokens": self._tokens, "units": self._units, "seconds": time.monotonic() - self._began}
        temporary = self._files[self.rank].with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(self._files[self.rank])

    def _sums(self) -> tuple[int, int, float]:
        """Tokens and conversations of all processes, and the seconds of the one that worked longest."""
        states = [json.loads(file.read_text()) for file in self._files if file.exists()]
        return sum(s["tokens"] for s in states), sum(s["units"] for s in states), max(s["seconds"] for s in states)

    def add(self, *, tokens: int, units: int) -> None:
        """Count an answer; `units` is 1 where it was a conversation's last."""
        self._tokens += tokens
        self._units += units
        if time.monotonic() - self._shared >= INTERVAL_SECONDS:
            self._shared = time.monotonic()
            self._share()
            self._log()

    def finish(self) -> None:
        """This process has no more to do."""
        self._share()
        self._log()

    def _log(self) -> None:
        if self.rank == 0:
            tokens, units, seconds = self._sums()
            left = format_seconds(seconds / units * (self.num_units - units)) if units else "unknown time"
            rate = tokens / max(seconds, 1e-9)
            logger.info("target's answers: %d/%d, %.0f tokens/s, %s left", units, self.num_units, rate, left)

    def tokens_per_second(self) -> float | None:
        """Rate of all processes together; None where nothing had to be written."""
        tokens, _, seconds = self._sums()
        return round(tokens / seconds, 1) if tokens else None

    def remove_files(self) -> None:
        """Remove what the processes shared, and what a killed run of more processes left."""
        for file in self._directory.glob("progress-*"):
            file.unlink(missing_ok=True)
