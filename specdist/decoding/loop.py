"""Owns the speculative decoding loop: propose, verify in one target pass, keep the accepted tokens in the caches.

Batch size 1. Shapes: N drafted tokens of a block, V vocabulary, D hidden size.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import perf_counter as clock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StopStringCriteria

from specdist.decoding.ends import Stops, most_new_tokens
from specdist.decoding.policies import Block, DraftLengthPolicy, FixedLength
from specdist.drafters.base import DecodeContext, Drafter, Proposal
from specdist.errors import ConfigError
from specdist.schema import PromptCounts, SamplingSpec
from specdist.target import check_tree_decoding, forward_block, keep_fed, new_cache
from specdist.tree import block_attention
from specdist.verify import TypicalAcceptance, uniform_numbers, verify

_NO_DRAFT, _NO_NUMBERS = Proposal(torch.empty(0, dtype=torch.long)), torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """One verify step: the block's start in the completion, tokens drafted, tokens accepted (bonus excluded)."""

    start: int
    drafted: int
    accepted: int


@dataclass
class DecodeResult:
    """A decoded completion with its verify steps and where the time went, in seconds.

    `lossless`: whether it is distributed as the target's own, which it is under every rule but typical acceptance.
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

    def counts(self, prompt_id: str, domain: str, num_speculative_tokens: int) -> PromptCounts:
        """The counters of this text. What was drafted past its end does not count (replay.py, last paragraph)."""
        length = len(self.completion_ids)
        drafted = [min(step.drafted, length - step.start) for step in self.steps]
        accepted = [min(step.accepted, length - step.start) for step in self.steps]
        at_position = [float(sum(a > i for a in accepted)) for i in range(num_speculative_tokens)]
        return PromptCounts(prompt_id, domain, float(len(self.steps)), float(sum(drafted)), at_position)

    def draft_lengths(self) -> dict[int, int]:
        """How many steps drafted so many tokens (of a tree: levels), by number; 0 where the target went on alone."""
        return dict(sorted(Counter(step.drafted for step in self.steps).items()))


@dataclass(frozen=True)
class _Verified:
    """What one pass of the target adds to the text: the accepted drafts, then its own token.

    `num_levels`: tokens drafted, of a tree its levels. `newest_hidden` [D]: the state that produced its own token.
    """

    token_ids: list[int]
    num_accepted: int
    num_levels: int
    newest_hidden: Tensor


class _Verifier:
    """The target at work on one text: its cache, and the rule by which it accepts."""

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: SamplingSpec,
        generator: torch.Generator,
        typical: TypicalAcceptance | None,
    ) -> None:
        self.model, self.cache = model, new_cache(model)
        self.sampling, self.generator, self.typical = sampling, generator, typical

    def read(self, prompt_ids: list[int]) -> _Verified:
        """Feed the prompt, which gives the first token."""
        hidden, logits = forward_block(self.model, prompt_ids, self.cache, logits_to_keep=1)
        return _Verified([self._decide(logits, _NO_DRAFT)[1]], 0, 0, hidden[-1])

    def check(self, newest_id: int, draft_ids: list[int], proposal: Proposal) -> _Verified:
        """Feed the newest token and the drafts of `proposal`; the cache keeps those that are accepted."""
        visible = None if proposal.parents is None else block_attention(proposal.parents)  # [N + 1, N + 1]
        hidden, logits = forward_block(self.model, [newest_id, *draft_ids], self.cache, visible=visible)
        accepted, following = self._decide(logits, proposal)
        keep_fed(self.cache, len(draft_ids), accepted)
        num_levels = len(draft_ids) if visible is None else int(visible.sum(dim=-1).max()) - 1
        token_ids = [*(draft_ids[node] for node in accepted), following]
        return _Verified(token_ids, len(accepted), num_levels, hidden[accepted[-1] + 1 if accepted else 0])

    def _decide(self, logits: Tensor, proposal: Proposal) -> tuple[list[int], int]:
        """The accepted drafts' numbers, and the target's token after them. `logits` [N + 1, V]."""
        ids, probs, parents = proposal.token_ids.to(logits.device)[None], proposal.probs, proposal.parents
        uniforms = _NO_NUMBERS if self.sampling.is_greedy else uniform_numbers((1, len(logits)), self.generator)
        last, following = verify(
            logits[None],
            ids,
            None if probs is None else probs[None],
            None if parents is None else parents.to(logits.device),
            self.sampling,
            uniforms,
            self.typical,
        )
        node, token = torch.cat([last, following]).tolist()
        return (list(range(node + 1)) if parents is None else _path(node, parents.tolist())), token


def _path(node: int, parents: list[int]) -> list[int]:
    """The nodes of a tree from the top down to `node`, none for −1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _check(
    model: PreTrainedModel,
    drafter: Drafter | None,
    policy: DraftLengthPolicy,
    sampling: SamplingSpec,
    typical: TypicalAcceptance | None,
) -> None:
    if typical is not None and sampling.is_greedy:
        raise ConfigError("typical acceptance at temperature 0: it compares probabilities; give a temperature above 0")
    if drafter is not None and drafter.tree is not None:
        check_tree_decoding(model, new_cache(model))
        if policy.confidence_threshold:
            raise ConfigError(
                "a confidence threshold with a draft tree, whose levels have many tokens: draft a chain, or leave the "
                "threshold out"
            )


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt_ids: list[int],
    sampling: SamplingSpec,
    eos_token_ids: Collection[int],
    *,
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 0,
    policy: DraftLengthPolicy | None = None,
    draft_sample_method: str = "greedy",
    stop_strings: StopStringCriteria | None = None,
    typical: TypicalAcceptance | None = None,
    generator: torch.Generator | None = None,
    on_step: Callable[[list[int], int], None] | None = None,
) -> DecodeResult:
    """Decode one prompt, speculatively with a `drafter` and by the target alone without.

    Blocks have `num_speculative_tokens`, or as many as `policy` says where one is given. The output is the target's
    own: token for token at temperature 0, in distribution above it (verify.py). `typical` accepts more and gives that
    up: the result is marked as not lossless. The text ends with the first EOS id, with the token that completes a stop
    string, at `sampling.max_new_tokens`, or at the model's context length. `on_step` is told the tokens that each pass
    of the target added, the prompt's first, and how many of them from the front were drafted; its time does not count.
    Raises ConfigError where the drafter's tree fits neither the model nor the policy, and where `typical` is given at
    temperature 0.
    """
    policy = policy or FixedLength(num_speculative_tokens)
    _check(model, drafter, policy, sampling, typical)
    generator = generator or torch.Generator(device=model.device).manual_seed(0)
    samples_drafts = draft_sample_method == "probabilistic" and not sampling.is_greedy
    limit = most_new_tokens(model, prompt_ids, sampling)
    stops = Stops(frozenset(eos_token_ids), stop_strings)
    tokens = list(prompt_ids)
    context = DecodeContext(tokens, sampling if samples_drafts else None, generator, policy.confidence_threshold)
    verifier = _Verifier(model, sampling, generator, typical)
    tell = on_step or (lambda token_ids, num_accepted: None)
    began = clock()
    verified = verifier.read(tokens)
    if drafter is not None:
        drafter.reset()
    tokens += verified.token_ids
    stopped = stops.cut(tokens, 1)
    result = DecodeResult([], "length", prefill_seconds=clock() - began, lossless=typical is None)
    tell(tokens[-1:], 0)
    while not stopped and (done := len(tokens) - len(prompt_ids)) < limit:
        began = clock()
        proposal = _propose(drafter, context, verified.newest_hidden, min(policy.draft_length(), limit - done))
        draft_ids = [max(token, 0) for token in proposal.token_ids.tolist()]  # where there was none to draw: any
        drafted = clock()
        verified = verifier.check(tokens[-1], draft_ids, proposal)
        tokens += verified.token_ids[: limit - done]
        stopped = stops.cut(tokens, len(tokens) - len(prompt_ids) - done)
        result.add(Step(done, verified.num_levels, verified.num_accepted), drafted - began, clock() - drafted)
        policy.update(Block(verified.num_levels, verified.num_accepted, clock() - began))
        fresh = tokens[len(prompt_ids) + done :]
        tell(fresh, min(verified.num_accepted, len(fresh)))
    result.completion_ids = tokens[len(prompt_ids) :]
    result.finish_reason = "stop" if stopped else "length"
    return result


def _propose(drafter: Drafter | None, context: DecodeContext, newest_hidden: Tensor, max_tokens: int) -> Proposal:
    """A block of at most `max_tokens`, of none without a drafter. What became of the last one it learns in any case."""
    if drafter is not None:
        drafter.commit(len(context.token_ids), newest_hidden)
        if max_tokens := min(max_tokens, drafter.max_draft_tokens or max_tokens):
            return drafter.propose(context, max_tokens)
    return _NO_DRAFT
