"""Owns one check of the gate: how it is made, and how it says that it informs and does not judge."""

import math
from collections.abc import Sequence

from specdist.schema import GateCheck

SHOWN = "shown: "  # starts the reason of a check that informs and does not judge


def make_check(
    name: str,
    passed: bool,
    reason: str,
    *,
    on_failure: str = "reject",
    observed: float | None = None,
    threshold: float | None = None,
    champion: float | None = None,
    p_value: float | None = None,
    num_prompts_needed: int | None = None,
) -> GateCheck:
    """A check whose numbers are finite: what is not is left out, and the reason says it."""
    observed, threshold, champion = (
        value if value is None or math.isfinite(value) else None for value in (observed, threshold, champion)
    )
    return GateCheck(name, passed, observed, threshold, champion, on_failure, reason, p_value, num_prompts_needed)


def some(items: Sequence[str], *, limit: int = 3, separator: str = ", ") -> str:
    """The first `limit` items, and how many more there are."""
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
