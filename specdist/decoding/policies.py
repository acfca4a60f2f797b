"""Owns how many tokens the next block drafts, and whether drafting pays at all.

A policy learns from block to block, over texts as well. Give each text its own where its counters must not depend on
the texts before it, as in an evaluation.
"""

from collections import deque
from dataclasses import dataclass
from statistics import mean, median
from typing import Protocol

from specdist.errors import ConfigError

POLICIES = ("fixed", "confidence", "last-block", "acceptance", "pays")
_CONFIDENCE = 0.4  # as in transformers (FixedLength)


@dataclass(frozen=True)
class Block:
    """What became of a block: tokens drafted and accepted, and the seconds of its whole step."""

    drafted: int
    accepted: int
    seconds: float


class DraftLengthPolicy(Protocol):
    """Says how long the next block may be, and is told what became of it.

    `confidence_threshold`: a block ends after the first token that the draft gives less than this; 0 is off.
    """

    confidence_threshold: float

    def draft_length(self) -> int:
        """Most tokens of the next block, of a tree its most levels; 0 to let the target go on alone."""

    def update(self, block: Block) -> None:
        """Learn from the block that this length led to."""


def _check_lengths(shortest: int, start: int, longest: int) -> None:
    if not 1 <= shortest <= start <= longest:
        raise ConfigError(f"draft lengths from {shortest} to {longest}, first {start}: expected 1 ≤ from ≤ first ≤ to")


class FixedLength:
    """The same length for every block, shorter only after a token of low confidence where a threshold is given.

    The threshold is that of dynamic draft length in transformers (Mamou et al. 2024), where it is 0.4.
    """

    def __init__(self, num_speculative_tokens: int, *, confidence_threshold: float = 0.0) -> None:
        self.length, self.confidence_threshold = num_speculative_tokens, confidence_threshold

    def draft_length(self) -> int:
        return self.length

    def update(self, block: Block) -> None:
        """Nothing to learn."""


class ByLastBlock:
    """One more than before where the last block had more than 0.8 of its tokens accepted, one fewer below 0.4."""

    confidence_threshold = 0.0

    def __init__(self, start: int = 4, shortest: int = 1, longest: int = 8) -> None:
        _check_lengths(shortest, start, longest)
        self.length, self.shortest, self.longest = start, shortest, longest

    def draft_length(self) -> int:
        return self.length

    def update(self, block: Block) -> None:
        if block.drafted:
            share = block.accepted / block.drafted
            self.length += (share > 0.8) - (share < 0.4)
            self.length = min(max(self.length, self.shortest), self.longest)


class ByAcceptance:
    """Keeps the accepted share of the last `window` drafted tokens within `target` ± `band`.

    Above the band blocks get one longer, below it one shorter; then the window fills anew, since a share says nothing
    about another length.
    """

    confidence_threshold = 0.0

    def __init__(
        self,
        start: int = 4,
        shortest: int = 2,
        longest: int = 8,
        *,
        target: float = 0.75,
        band: float = 0.1,
        window: int = 100,
    ) -> None:
        _check_lengths(shortest, start, longest)
        self.length, self.shortest, self.longest = start, shortest, longest
        self.low, self.high = target - band, target + band
        self._outcomes: deque[bool] = deque(maxlen=window)

    def draft_length(self) -> int:
        return self.length

    def update(self, block: Block) -> None:
        self._outcomes.extend(i < block.accepted for i in range(block.drafted))
        if len(self._outcomes) < (self._outcomes.maxlen or 0):
            return
        share = mean(self._outcomes)
        length = min(max(self.length + (share > self.high) - (share < self.low), self.shortest), self.longest)
        if length != self.length:
            self.length = length
            self._outcomes.clear()


class WhileItPays:
    """Drafts as `policy` says while that takes less time for a token than the target alone, both by the clock.

    First, and after every `refresh` trials that paid, the target goes on alone for a few steps, so that what it costs
    is known. Each trial of so many blocks is then judged by its median step; one that did not pay is followed by
    `pause` steps of the target alone, and another trial.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        *,
        probe: int = 4,
        trial: int = 16,
        pause: int = 64,
        refresh: int = 16,
    ) -> None:
        if min(probe, trial, pause, refresh) < 1:
            raise ConfigError(
                f"probe {probe}, trial {trial}, pause {pause}, refresh {refresh}: expected 1 or more each"
            )
        self.policy, self.confidence_threshold = policy, policy.confidence_threshold
        self.trial, self.probe, self.pause, self.refresh = trial, probe, pause, refresh
        self._step_seconds = 0.0  # of the target alone
        self._trials_paid = 0
        self._begin(drafting=False, steps=probe)

    def _begin(self, *, drafting: bool, steps: int) -> None:
        self.drafting, self._steps_left = drafting, steps
        self._blocks: list[Block] = []

    def draft_length(self) -> int:
        return self.policy.draft_length() if self.drafting else 0

    def update(self, block: Block) -> None:
        if self.drafting:
            self.policy.update(block)
        self._blocks.append(block)
        self._steps_left -= 1
        if not self._steps_left:
            self._judge()

    def _judge(self) -> None:
        seconds = median(block.seconds for block in self._blocks)  # of a step; a disturbed one does not decide
        if not self.drafting:
            self._step_seconds = seconds
            self._begin(drafting=True, steps=self.trial)
        elif seconds / mean(1 + block.accepted for block in self._blocks) > self._step_seconds:
            self._trials_paid = 0
            self._begin(drafting=False, steps=self.pause)
        else:
            self._trials_paid += 1
            probing = self._trials_paid % self.refresh == 0
            self._begin(drafting=not probing, steps=self.probe if probing else self.trial)


def make_policy(name: str, length: int, longest: int | None = None) -> DraftLengthPolicy:
    """The policy of POLICIES that `name` says, which starts with blocks of `length`, as a person would have it.

    `longest`: the most that the drafter can draft, None for no limit. "confidence": up to that while the draft is sure
    enough; "pays": `length` while that pays.
    """
    longest = longest or max(8, length)
    if name == "confidence":
        return FixedLength(longest, confidence_threshold=_CONFIDENCE)
    if name == "last-block":
        return ByLastBlock(length, 1, longest)
    if name == "acceptance":
        return ByAcceptance(length, min(2, length), longest)
    return WhileItPays(FixedLength(length)) if name == "pays" else FixedLength(length)
