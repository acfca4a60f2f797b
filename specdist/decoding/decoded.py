"""Owns a text while it is decoded, and what is told of it in the end: its tokens, where it ends, its verify steps."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter as clock

from torch import Tensor
from transformers import PreTrainedModel

from specdist.decoding.ends import Stops, most_new_tokens
from specdist.decoding.policies import Block, DraftLengthPolicy
from specdist.drafters.base import DecodeContext
from specdist.schema import PromptCounts, SamplingSpec

OnStep = Callable[[list[int], int], None]


@dataclass(frozen=True)
class Step:
    """One verify step: the block's start in the completion, tokens drafted, tokens accepted (bonus excluded).

    What lies past the text's end was drafted, which took its time, but is not accepted.
    """

    start: int
    drafted: int
    accepted: int


@dataclass
class DecodeResult:
    """A decoded completion with its verify steps and where the time went, in seconds.

    Of texts that are decoded together each has all seconds of the steps that it took part in: those of the one that
    ends last are those of the batch. `lossless`: whether it is distributed as the target's own, which it is under
    every rule but typical acceptance.
    """

    completion_ids: list[int]
    finish_reason: str
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    lossless: bool = True

    def add(self, step: Step, draft_seconds: float, verify_seconds: float) -> None:
        self.steps.append(step)
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds

    def steps_in_text(self) -> list[tuple[int, int, int]]:
        """(start, tokens drafted, tokens accepted) of each step, up to the text's end, as `replay.greedy_steps`."""
        length = len(self.completion_ids)
        return [(step.start, min(step.drafted, length - step.start), step.accepted) for step in self.steps]

    def counts(self, prompt_id: str, domain: str, num_speculative_tokens: int) -> PromptCounts:
        """The counters of this text. What was drafted past its end does not count (replay.py, last paragraph)."""
        drafted = sum(of_step for _, of_step, _ in self.steps_in_text())
        at_position = [float(sum(s.accepted > i for s in self.steps)) for i in range(num_speculative_tokens)]
        return PromptCounts(prompt_id, domain, float(len(self.steps)), float(drafted), at_position)

    def draft_lengths(self) -> dict[int, int]:
        """How many steps drafted so many tokens (of a tree: levels), by number; 0 where the target went on alone."""
        return dict(sorted(Counter(step.drafted for step in self.steps).items()))


@dataclass(frozen=True)
class Verified:
    """What one pass of the target adds to a text: the accepted drafts, then its own token.

    `num_levels`: tokens drafted, of a tree its levels. `newest_hidden` [D]: the state that produced its own token.
    """

    token_ids: list[int]
    num_accepted: int
    num_levels: int
    newest_hidden: Tensor


class Text:
    """A prompt and what has been decoded after it. `context`: what a drafter sees of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        context: DecodeContext,
        sampling: SamplingSpec,
        stops: Stops,
        policy: DraftLengthPolicy,
        on_step: OnStep | None = None,
    ) -> None:
        """`context` holds the prompt's tokens, to which those that are decoded are added."""
        self.context, self.stops, self.policy = context, stops, policy
        self.prompt_length = len(context.token_ids)
        self.limit = most_new_tokens(model, context.token_ids, sampling)
        self.stopped = False
        self.result = DecodeResult([], "length")
        self._tell = on_step or (lambda token_ids, num_accepted: None)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.context.token_ids

    @property
    def most_tokens(self) -> int:
        """Its length in the end, at most."""
        return self.prompt_length + max(self.limit, 1)  # the first token comes in any case

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def ended(self) -> bool:
        return self.stopped or self.num_new >= self.limit

    def draft_length(self) -> int:
        """Most tokens of the next block, of a tree its most levels."""
        return min(self.policy.draft_length(), self.limit - self.num_new)

    def begin(self, verified: Verified, began: float) -> None:
        """Take the first token, which the prompt gave; `began` is the clock's when reading it did."""
        fresh = self._append(verified.token_ids)
        self.result.prefill_seconds = clock() - began
        self._tell(fresh, 0)

    def take(self, verified: Verified, began: float, drafted: float) -> None:
        """Take what a verify step adds, as far as the text goes on. The clock's times: it began, it had drafted."""
        start = self.num_new
        fresh = self._append(verified.token_ids[: self.limit - start])
        done = clock()
        accepted = min(verified.num_accepted, len(fresh))
        self.result.add(Step(start, verified.num_levels, accepted), drafted - began, done - drafted)
        # Where a text ends says nothing of how well it was drafted: the policy learns of the whole block
        self.policy.update(Block(verified.num_levels, verified.num_accepted, done - began))
        self._tell(fresh, accepted)

    def _append(self, token_ids: list[int]) -> list[int]:
        """Add tokens up to the first that ends the text; gives those."""
        start = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.stopped = self.stops.cut(self.token_ids, len(token_ids))
        return self.token_ids[start:]

    def finish(self, *, lossless: bool) -> DecodeResult:
        """The result, of a text that has ended."""
        self.result.lossless = lossless
        self.result.completion_ids = self.token_ids[self.prompt_length :]
        self.result.finish_reason = "stop" if self.stopped else "length"
        return self.result
