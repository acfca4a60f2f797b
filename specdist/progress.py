"""Owns the progress line of long work: how much is done, at what rate, how long it will take."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
INTERVAL_SECONDS = 10.0


def format_seconds(seconds: float) -> str:
    """Short reading of a duration: 42 s, 3 min 05 s, 2 h 10 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def track(items: Iterable[Item], total: int, what: str, logger: logging.Logger) -> Iterator[Item]:
    """Yield `items`, logging "what: done/total, rate, time left" every 10 seconds, and at the end if it was long."""
    began = shown = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - shown >= INTERVAL_SECONDS or (done == total and shown != began):
            rate = done / (now - began)
            left = "done" if done == total else f"{format_seconds((total - done) / rate)} left"
            logger.info("%s: %d/%d, %.1f/s, %s", what, done, total, rate, left)
            shown = now
