"""Owns the speculative decoding loop: propose, verify in one target pass, keep the accepted tokens in the caches.

Batch size 1. Shapes: N drafted tokens of a block, V vocabulary, D hidden size.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdist.drafters.base import DecodeContext, Drafter, Proposal
from specdist.errors import ConfigError
from specdist.schema import PromptCounts, SamplingSpec
from specdist.target import check_tree_decoding, forward_block, keep_fed, new_cache
from specdist.tree import block_attention
from specdist.verify import greedy_match, rejection_sample, sample, served_logprobs, tree_match, tree_sample


@dataclass(frozen=True)
class Step:
    """One verify step: the block's start in the completion, tokens drafted, tokens accepted (bonus excluded)."""

    start: int
    drafted: int
    accepted: int


@dataclass
class DecodeResult:
    """A decoded completion with its verify steps and where the time went, in seconds."""

    completion_ids: list[int]
    finish_reason: str
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def counts(self, prompt_id: str, domain: str, num_speculative_tokens: int) -> PromptCounts:
        """The counters of this text. What was drafted past its end does not count (replay.py, last paragraph)."""
        length = len(self.completion_ids)
        drafted = [min(step.drafted, length - step.start) for step in self.steps]
        accepted = [min(step.accepted, length - step.start) for step in self.steps]
        at_position = [float(sum(a > i for a in accepted)) for i in range(num_speculative_tokens)]
        return PromptCounts(prompt_id, domain, float(len(self.steps)), float(sum(drafted)), at_position)


def _verify(
    logits: Tensor, proposal: Proposal, sampling: SamplingSpec, generator: torch.Generator
) -> tuple[list[int], int]:
    """Verify a block: (the accepted drafts' numbers, the target's token after them). `logits` [N + 1, V]."""
    draft_ids, parents = proposal.token_ids, proposal.parents
    if parents is not None:
        if sampling.is_greedy:
            return tree_match(draft_ids, parents, logits.argmax(dim=-1))
        return tree_sample(draft_ids, parents, logits, sampling, generator)
    if sampling.is_greedy:
        accepted, following = greedy_match(draft_ids.to(logits.device), logits.argmax(dim=-1))
    else:
        probs = served_logprobs(logits, sampling).exp()
        accepted, following = rejection_sample(draft_ids, proposal.probs, probs, generator)
    return list(range(accepted)), following


def _check_tree(model: PreTrainedModel, cache: DynamicCache, samples_drafts: bool) -> None:
    check_tree_decoding(model, cache)
    if samples_drafts:
        raise ConfigError(
            "draft_sample_method probabilistic with a draft tree: its candidates are each head's best and are not "
            "drawn; use greedy"
        )


def _most_new_tokens(model: PreTrainedModel, prompt_ids: list[int], sampling: SamplingSpec) -> int:
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(sampling.max_new_tokens, context_length - len(prompt_ids)) if context_length else sampling.max_new_tokens


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt_ids: list[int],
    sampling: SamplingSpec,
    eos_token_ids: list[int],
    *,
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 0,
    draft_sample_method: str = "greedy",
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode one prompt, speculatively with a `drafter` and by the target alone without.

    The output is the target's own: token for token at temperature 0, in distribution above it (verify.py). It ends
    with the first EOS id, at `sampling.max_new_tokens`, or at the model's context length.
    """
    generator = generator or torch.Generator(device=model.device).manual_seed(0)
    samples_drafts = draft_sample_method == "probabilistic" and not sampling.is_greedy
    limit = _most_new_tokens(model, prompt_ids, sampling)
    block = num_speculative_tokens
    if drafter is not None and drafter.max_draft_tokens is not None:
        block = min(block, drafter.max_draft_tokens)
    stop = set(eos_token_ids)
    tokens = list(prompt_ids)
    cache = new_cache(model)
    if drafter is not None and drafter.tree is not None:
        _check_tree(model, cache, samples_drafts)
    clock = time.perf_counter
    began = clock()
    hidden, logits = forward_block(model, tokens, cache, logits_to_keep=1)
    if drafter is not None:
        drafter.reset()
    context = DecodeContext(tokens, sampling if samples_drafts else None, generator)
    first = logits.argmax(-1) if sampling.is_greedy else sample(served_logprobs(logits, sampling).exp(), generator)
    tokens.append(int(first[0]))
    newest_hidden = hidden[-1]
    result = DecodeResult([], "length", prefill_seconds=clock() - began)
    while tokens[-1] not in stop and (done := len(tokens) - len(prompt_ids)) < limit:
        began = clock()
        proposal = Proposal(torch.empty(0, dtype=torch.long))
        if drafter is not None:
            drafter.commit(len(tokens), newest_hidden)
            proposal = drafter.propose(context, min(block, limit - done))
        draft_ids = proposal.token_ids.tolist()
        visible = None if proposal.parents is None else block_attention(proposal.parents)
        drafted = clock()
        hidden, logits = forward_block(model, [tokens[-1], *draft_ids], cache, visible=visible)
        accepted, following = _verify(logits, proposal, sampling, generator)
        emitted = [*(draft_ids[node] for node in accepted), following]
        emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in stop), len(emitted))]
        tokens.extend(emitted[: limit - done])
        keep_fed(cache, len(draft_ids), accepted)
        newest_hidden = hidden[accepted[-1] + 1 if accepted else 0]
        num_levels = len(draft_ids) if visible is None else int(visible.sum(dim=-1).max()) - 1
        result.steps.append(Step(done, num_levels, len(accepted)))
        result.draft_seconds += drafted - began
        result.verify_seconds += clock() - drafted
    result.completion_ids = tokens[len(prompt_ids) :]
    result.finish_reason = "stop" if tokens[-1] in stop else "length"
    return result
