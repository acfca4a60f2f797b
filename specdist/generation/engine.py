"""Owns the interface between the data stage and whatever writes with the target: requests, answers, engines.

Shapes: n completion tokens of an answer, K best tokens of each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from specdist.schema import SamplingSpec


@dataclass(frozen=True)
class Request:
    """One text to be written: the ids that the target reads and how its answer is drawn. `key` is unique."""

    key: str
    prompt_ids: list[int]
    sampling: SamplingSpec
    seed: int  # of the row's random numbers: its draws do not depend on what else is written


@dataclass(frozen=True)
class TopLogprobs:
    """The best tokens at each token of an answer, best first: natural log-probabilities at temperature 1."""

    ids: list[list[int]]  # [n][K]
    logprobs: list[list[float]]  # [n][K]


@dataclass(frozen=True)
class Answer:
    """What the target wrote. `finish_reason`: "stop" (the last id is an EOS id) or "length"."""

    request: Request
    completion_ids: list[int]
    finish_reason: str
    top: TopLogprobs | None = None


class Engine(Protocol):
    """Writes answers, as many at a time as it can, in any order."""

    name: str  # with the version, for the manifest: "transformers 5.24.0"
    context_length: int | None  # longest prompt with answer, in tokens

    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """Take requests while there are any and yield each answer as it is done.

        `next_request` gives None where there is nothing to do now; there may be after the next answer, which can lead
        to the conversation's next turn. The iterator ends when there is nothing to do and nothing is being written.
        """

    def close(self) -> None:
        """Give back what the engine holds: memory, processes, connections."""
