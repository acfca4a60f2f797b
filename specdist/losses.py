"""Owns training objectives: pure functions of distributions per position, and what gives the two distributions.

Shapes: N supervised positions, C of them, D hidden size, R columns of a low-rank difference, V vocabulary, K best
tokens, E events.

An event is what a distribution is over: a token, or (with the target's best tokens alone) all others taken together.
Coarser events bound a divergence from below, by the data processing inequality. The overlap Σ min(p, q) leaves the
others out instead: how much of their mass lies on the same tokens is not known, and credit for it would be paid for
mass on the wrong ones. It is then a lower bound of the acceptance. No model is called here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specdist.objective import CROSS_ENTROPY, DIVERGENCES, OVERLAPS

IGNORED = -100  # label of a position that has none
LOG_ZERO = -100.0  # stands for log 0, so that the reverse KL to an impossible token is large and not infinite


def cross_entropy(draft_logprobs: Tensor, labels: Tensor) -> Tensor:
    """−log q(label): [..., V], [...] → [...]. Zero where the label is IGNORED."""
    return -draft_logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)


def forward_kl(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q): [..., E] → [...]. Covers all that the target may say (Hinton et al. 2015)."""
    return (target_logprobs.exp() * (target_logprobs - draft_logprobs)).sum(dim=-1)


def reverse_kl(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """KL(q ‖ p) = Σ q (log q − log p): [..., E] → [...]. Seeks the target's modes (Gu et al. 2024, MiniLLM)."""
    return (draft_logprobs.exp() * (draft_logprobs - target_logprobs)).sum(dim=-1)


def jensen_shannon(target_logprobs: Tensor, draft_logprobs: Tensor, beta: float) -> Tensor:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q: [..., E] → [...] (Agarwal et al. 2024, eq. 1).

    The formula is 0 at both ends of β; as in TRL, β = 0 stands for the forward and β = 1 for the reverse KL, which it
    approaches there when divided by β or 1 − β.
    """
    if beta in (0.0, 1.0):
        return (reverse_kl if beta else forward_kl)(target_logprobs, draft_logprobs)
    target_part, draft_part = beta * target_logprobs.exp(), (1.0 - beta) * draft_logprobs.exp()
    mixture = (target_part + draft_part + torch.finfo(torch.float32).tiny).log()
    return (target_part * (target_logprobs - mixture) + draft_part * (draft_logprobs - mixture)).sum(dim=-1)


def _minimum(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """min(log p, log q), whose gradient needs no masks: those of torch.minimum cost more than a pass of softmax."""
    return draft_logprobs - torch.relu(draft_logprobs - target_logprobs)


def total_variation(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """1 − Σ min(p, q) = ½ Σ |p − q|: [..., E] → [...]. The probability of a rejection (Leviathan et al. 2023, 3.3)."""
    return 1.0 - _minimum(target_logprobs, draft_logprobs).exp().sum(dim=-1)


def negative_log_acceptance(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """−log Σ min(p, q): [..., E] → [...]. Unlike the total variation it has a gradient where the two hardly overlap.

    The log of the expected acceptance of one token, so that a sum over positions is that of a whole run.
    """
    return -_minimum(target_logprobs, draft_logprobs).logsumexp(dim=-1)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of named losses, between distributions at the temperature that is served."""

    weights: dict[str, float]
    temperature: float = 1.0
    beta: float = 0.5  # of jensen_shannon

    @property
    def needs_target(self) -> bool:
        """Whether it compares distributions, and not the target's tokens alone."""
        return any(name in DIVERGENCES for name in self.weights)

    def terms(
        self,
        draft_logprobs: Tensor,
        labels: Tensor,
        target_logprobs: Tensor | None,
        draft_events: Tensor | None,
        *,
        lumps_others: bool = False,
    ) -> Tensor:
        """Each loss at each position, unweighted, in the order of `weights`: [terms, C].

        `draft_logprobs` [C, V]; `labels` [C]; both of the target's events [C, E], or None without divergences.
        `lumps_others`: the last event is all tokens that have none of their own.
        """
        functions: dict[str, Callable[..., Tensor]] = {
            "forward_kl": forward_kl,
            "reverse_kl": reverse_kl,
            "jensen_shannon": partial(jensen_shannon, beta=self.beta),
            "total_variation": total_variation,
            "negative_log_acceptance": negative_log_acceptance,
        }

        def divergence(name: str) -> Tensor:
            end = -1 if lumps_others and name in OVERLAPS else None
            return functions[name](target_logprobs[..., :end], draft_events[..., :end])  # type: ignore[index]

        return torch.stack(
            [
                cross_entropy(draft_logprobs, labels) if name == CROSS_ENTROPY else divergence(name)
                for name in self.weights
            ]
        )


@dataclass(frozen=True)
class Projection:
    """From hidden states to logits: `weight` [V, D], `bias` [V], then a scale, then a soft cap (Gemma 2).

    With `update` [V, R], states have R more columns, their coordinates in a low-rank difference to the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    update: Tensor | None = None

    def of(self, hidden: Tensor) -> Tensor:
        """Logits in fp32 of states, all at once: [..., D] or [..., D + R] → [..., V]."""
        columns = self.weight.shape[1]
        product = hidden[..., :columns] @ self.weight.T
        if self.update is not None:
            product = product + hidden[..., columns:] @ self.update.T
        return self.logits(product)

    def logits(self, product: Tensor) -> Tensor:
        """Logits in fp32 from the product of states and weight, which may be overwritten: [..., V]."""
        logits = product.float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class TargetDistributions(Protocol):
    """The target's distributions at N positions, some at a time. `lumps_others` as in `Objective.terms`."""

    @property
    def lumps_others(self) -> bool: ...

    def part(self, chunk: slice) -> "TargetDistributions":
        """Those at some positions, with what is best computed for all of them at once."""

    def logprobs(self, chunk: slice, temperature: float) -> Tensor:
        """Log-probabilities of its events at `temperature`, fp32: [C, E]."""

    def events(self, draft_logprobs: Tensor, chunk: slice) -> Tensor:
        """The draft's log-probabilities [C, V] of the same events: [C, E]."""


@dataclass(frozen=True)
class FullTarget:
    """All tokens, from the target's final hidden states (after the norm) and its projection.

    `hidden` [N, D]. `vocabulary` [R]: the tokens that the draft's R logits stand for, None where they are the same.
    What the target would say beyond them is no event: it can never be accepted, whatever the draft does.
    """

    hidden: Tensor
    projection: Projection
    vocabulary: Tensor | None = None
    lumps_others = False

    def part(self, chunk: slice) -> "TargetDistributions":
        weight = self.projection.weight
        with torch.autocast(weight.device.type, enabled=False):  # in the target's own dtype
            product = self.hidden[chunk].to(weight.dtype) @ weight.T  # [C, V]
        return _ProjectedTarget(product, self.projection, self.vocabulary)

    def logprobs(self, chunk: slice, temperature: float) -> Tensor:
        return self.part(chunk).logprobs(slice(None), temperature)

    def events(self, draft_logprobs: Tensor, chunk: slice) -> Tensor:
        return draft_logprobs


@dataclass(frozen=True)
class _ProjectedTarget:
    """A FullTarget whose states have met the projection: `product` [N, V], in the target's dtype."""

    product: Tensor
    projection: Projection
    vocabulary: Tensor | None
    lumps_others = False

    def part(self, chunk: slice) -> "TargetDistributions":
        return replace(self, product=self.product[chunk])

    def logprobs(self, chunk: slice, temperature: float) -> Tensor:
        logprobs = _log_softmax(self.projection.logits(self.product[chunk]), temperature)
        return logprobs if self.vocabulary is None else logprobs[:, self.vocabulary]

    def events(self, draft_logprobs: Tensor, chunk: slice) -> Tensor:
        return draft_logprobs


@dataclass(frozen=True)
class TopTarget:
    """The target's K best tokens as stored, and all others as one event.

    `ids` [N, K] (places among the draft's R logits; R stands for a token that it cannot propose), `top_logprobs`
    [N, K] at temperature 1, best first, `tail_mass` [N]. At a temperature T < 1 the others' mass is taken at its upper
    bound, tail_mass · p_K^(1/T − 1), since none of them is more probable than the K-th token.
    """

    ids: Tensor
    top_logprobs: Tensor
    tail_mass: Tensor
    lumps_others = True

    def part(self, chunk: slice) -> "TargetDistributions":
        return TopTarget(self.ids[chunk], self.top_logprobs[chunk], self.tail_mass[chunk])

    def logprobs(self, chunk: slice, temperature: float) -> Tensor:
        best = self.top_logprobs[chunk].float()  # [C, K]
        tail = self.tail_mass[chunk].float().log() + (1.0 / temperature - 1.0) * best[:, -1]  # [C]
        return torch.cat([best / temperature, tail[:, None]], dim=-1).log_softmax(dim=-1).clamp(min=LOG_ZERO)

    def events(self, draft_logprobs: Tensor, chunk: slice) -> Tensor:
        ids = self.ids[chunk]
        draft_logprobs = torch.nn.functional.pad(draft_logprobs, (0, 1), value=LOG_ZERO)  # [C, R + 1]
        others = draft_logprobs.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)  # [C, 1]
        return torch.cat([draft_logprobs.gather(-1, ids), others], dim=-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def position_losses(
    objective: Objective, draft_logits: Tensor, labels: Tensor, target: TargetDistributions | None, chunk: slice
) -> Tensor:
    """Each loss of `objective` at each position of a chunk: `draft_logits` [C, V], `labels` [C] → [terms, C].

    With a chunk of all positions it is the eager form, to which the fused one is compared.
    """
    draft_logprobs = _log_softmax(draft_logits, objective.temperature)
    if target is None:
        return objective.terms(draft_logprobs, labels, None, None)
    with torch.no_grad():
        target_logprobs = target.logprobs(chunk, objective.temperature)
    events = target.events(draft_logprobs, chunk)
    return objective.terms(draft_logprobs, labels, target_logprobs, events, lumps_others=target.lumps_others)
