"""Owns the speculative decoding loop: propose, verify in one target pass, keep the accepted tokens in the caches.

It runs over rows of text, which accept and end each for itself; one text is a batch of one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter as clock

import torch
from transformers import PreTrainedModel
from transformers.generation import StopStringCriteria

from specdist.decoding.decoded import DecodeResult, OnStep, Step, Text, Verified
from specdist.decoding.ends import Stops
from specdist.decoding.policies import DraftLengthPolicy, FixedLength
from specdist.decoding.rows import NO_DRAFT, ManyRows, Rule, SingleRow, TargetRows
from specdist.drafters.base import BatchDrafter, DecodeContext, Drafter, Proposal
from specdist.drafters.one_by_one import OneByOne
from specdist.errors import ConfigError
from specdist.in_place import fits_in_place, without
from specdist.schema import SamplingSpec
from specdist.target import check_tree_decoding, new_cache
from specdist.verify import TypicalAcceptance

__all__ = ["DecodeResult", "Step", "decode", "decode_batch"]


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


@dataclass(frozen=True)
class _Decoding:
    """What all texts of a call have in common."""

    model: PreTrainedModel
    sampling: SamplingSpec
    stops: Stops
    drafter: Drafter | None
    draft_sample_method: str
    typical: TypicalAcceptance | None

    def text(
        self,
        prompt_ids: list[int],
        policy: DraftLengthPolicy,
        generator: torch.Generator,
        on_step: OnStep | None = None,
    ) -> Text:
        """A text at its beginning."""
        _check(self.model, self.drafter, policy, self.sampling, self.typical)
        samples_drafts = self.draft_sample_method == "probabilistic" and not self.sampling.is_greedy
        context = DecodeContext(
            list(prompt_ids), self.sampling if samples_drafts else None, generator, policy.confidence_threshold
        )
        return Text(self.model, context, self.sampling, self.stops, policy, on_step)

    def alone(self, text: Text) -> DecodeResult:
        """Decode one text, with a cache that is right for every model."""
        if self.drafter is not None:
            self.drafter.reset()
        _run([text], SingleRow(self.model, self._rule), OneByOne([self.drafter]) if self.drafter else None)
        return text.finish(lossless=self.typical is None)

    def together(self, texts: Sequence[Text]) -> list[DecodeResult]:
        """Decode texts in the rows of one batch, where the longest prompts come first."""
        rows = sorted(texts, key=lambda text: -text.prompt_length)
        width = max(text.most_tokens for text in texts)
        _run(rows, ManyRows(self.model, self._rule), self.drafter.batched(len(rows), width) if self.drafter else None)
        return [text.finish(lossless=self.typical is None) for text in texts]

    @property
    def _rule(self) -> Rule:
        return Rule(self.sampling, self.typical)


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
    on_step: OnStep | None = None,
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
    stops = Stops(frozenset(eos_token_ids), stop_strings)
    decoding = _Decoding(model, sampling, stops, drafter, draft_sample_method, typical)
    generator = generator or torch.Generator(device=model.device).manual_seed(0)
    return decoding.alone(decoding.text(prompt_ids, policy or FixedLength(num_speculative_tokens), generator, on_step))


@torch.inference_mode()
def decode_batch(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    sampling: SamplingSpec,
    eos_token_ids: Collection[int],
    *,
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 0,
    policy: Callable[[], DraftLengthPolicy] | None = None,
    draft_sample_method: str = "greedy",
    stop_strings: StopStringCriteria | None = None,
    typical: TypicalAcceptance | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> list[DecodeResult]:
    """Decode several prompts at once, each as `decode` would: results in their order.

    A row accepts and ends for itself; the batch around it changes its logits by rounding only. Every row has a policy
    of its own, made by `policy`, and its own of `generators` (without: seeded by its number). A model whose cache
    cannot be written in place (`fits_in_place`: a sliding window, say) decodes one prompt after the other. Raises as
    `decode`.
    """
    stops = Stops(frozenset(eos_token_ids), stop_strings)
    decoding = _Decoding(model, sampling, stops, drafter, draft_sample_method, typical)
    make_policy = policy or (lambda: FixedLength(num_speculative_tokens))
    generators = generators or [torch.Generator(device=model.device).manual_seed(i) for i in range(len(prompts))]
    texts = [decoding.text(p, make_policy(), generator) for p, generator in zip(prompts, generators, strict=True)]
    if not texts or not fits_in_place(model):
        return [decoding.alone(text) for text in texts]
    return decoding.together(texts)


def _run(texts: list[Text], target: TargetRows, drafter: BatchDrafter | None) -> None:
    """Decode `texts` to their ends, all at once; a text that has ended leaves the rows to the others."""
    began = clock()
    verified = target.read(texts)
    for text, first in zip(texts, verified, strict=True):
        text.begin(first, began)
    while going := [i for i, text in enumerate(texts) if not text.ended]:
        if len(going) < len(texts):
            order = without([i for i, text in enumerate(texts) if text.ended], len(texts))
            texts, verified = [texts[i] for i in order], [verified[i] for i in order]
            target.keep(order)
            if drafter is not None:
                drafter.keep_rows(order)
        began = clock()
        proposals = _propose(drafter, texts, verified)
        drafted = clock()
        verified = target.check(texts, proposals)
        for text, step in zip(texts, verified, strict=True):
            text.take(step, began, drafted)


def _propose(drafter: BatchDrafter | None, texts: list[Text], verified: list[Verified]) -> Sequence[Proposal]:
    """A block for each text, of none without a drafter; its tokens on the host, so that what drafting took is known."""
    if drafter is None:
        return [NO_DRAFT] * len(texts)
    most = [text.draft_length() for text in texts]
    if drafter.max_draft_tokens:
        most = [min(length, drafter.max_draft_tokens) for length in most]
    hidden = [step.newest_hidden for step in verified]
    blocks = drafter.propose_rows([text.context for text in texts], hidden, most)
    return [replace(block, token_ids=block.token_ids.cpu()) for block in blocks]
