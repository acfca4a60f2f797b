"""Owns the acceptance rules of speculative decoding, and the one definition of the distribution that is served.

Shapes: B rows (texts), N drafted tokens of a block, K candidates, V vocabulary. Pure torch, fp32 inside, no model.

A block is a chain, or a tree by `parents` [N], which all rows share (tree.py): −1 is the newest token of the text, and
parents stand before their children. `draft_ids` [B, N] hold −1 where a row drafts nothing. `uniforms` [B, N + 1] lie in
[0, 1): one for each draft and one for the target's token, so that a row's outcome depends on that row alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdist.errors import ConfigError
from specdist.schema import SamplingSpec
from specdist.tree import block_attention, children

_NUCLEUS_SIZE = 128  # tokens that are looked at first for top-p: enough for nearly every row
_TINY = torch.finfo(torch.float32).tiny  # divides in place of an empty sum, whose quotient is not used


def served_logprobs(logits: Tensor, sampling: SamplingSpec) -> Tensor:
    """Log-probabilities that the server samples from: temperature, top-k, top-p, min-p. fp32, −inf where filtered.

    `logits` [..., V] → [..., V]. The order is that of transformers; vLLM applies min-p before top-k and top-p, which
    is the same unless both min-p and top-p are on. Top-p keeps the smallest set of most probable tokens whose mass
    reaches `top_p` (Holtzman et al. 2020), min-p the tokens that have at least `min_p` times the probability of the
    best (Nguyen et al. 2024). Raises ConfigError at temperature 0, where the served choice is the argmax and not a
    distribution.
    """
    return _served_scores(logits, sampling).log_softmax(dim=-1)


def served_probs(logits: Tensor, sampling: SamplingSpec) -> Tensor:
    """The probabilities of `served_logprobs`, [..., V] → [..., V]: faster than their exponential."""
    return _served_scores(logits, sampling).softmax(dim=-1)


def _served_scores(logits: Tensor, sampling: SamplingSpec) -> Tensor:
    """Scaled logits, −inf where filtered: [..., V] → [..., V], fp32."""
    if sampling.is_greedy:
        raise ConfigError("temperature 0 has no distribution to sample from: take the argmax of the logits instead")
    scores = logits.float() / sampling.temperature  # [..., V]
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k, dim=-1).values[..., -1:]  # [..., 1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        scores = scores.masked_fill(~_nucleus(scores, sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        threshold = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)  # [..., 1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Mask [..., V] of the smallest set of most probable tokens with a mass of `top_p`; of equal ones the lowest ids.

    The most probable are found without sorting all V, in blocks that grow until the nucleus of every row is inside.
    """
    total = scores.logsumexp(dim=-1, keepdim=True)  # [..., 1]
    size = _NUCLEUS_SIZE
    while True:
        best = scores.topk(min(size, scores.shape[-1]), dim=-1).values  # [..., K], falling
        probs = (best - total).exp()
        inside = probs.cumsum(dim=-1) - probs < top_p  # [..., K]; the mass before a token is short of top_p
        if size >= scores.shape[-1] or not bool(inside[..., -1].any()):
            break
        size *= 8
    last = best.gather(-1, inside.sum(dim=-1, keepdim=True) - 1)  # [..., 1], score of the least probable inside
    tied = scores == last
    num_tied = (inside & (best == last)).sum(dim=-1, keepdim=True)
    return (scores > last) | (tied & (tied.cumsum(dim=-1) <= num_tied))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token from each row of `probs` [..., V] by the inverse of its distribution function: [...].

    `uniforms` [...] in [0, 1), fp64. Rows need not sum to 1. A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(dim=-1)
    # 1 − u lies in (0, 1]: a threshold of 0 would select a leading token of probability 0
    threshold = (1.0 - uniforms.to(probs.device)).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold).squeeze(-1)


def uniform_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers in [0, 1), fp64, on the generator's device."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def sample_candidates(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw K distinct tokens of each row of `probs` [B, V], one after the other: [B, K], −1 where none is left.

    `uniforms` [B, K] as in `draw`. Also what each was drawn from, [B, K, V]: `probs` without those before it,
    renormalised. It is what `tree_rejection_sample` needs of siblings.
    """
    ids, drawn_from, left = [], [], probs
    for numbers in uniforms.unbind(dim=-1):
        mass = left.sum(dim=-1, keepdim=True)  # [B, 1]
        drawn_from.append(left / mass.clamp(min=_TINY))
        token = draw(drawn_from[-1], numbers)[:, None]  # [B, 1]
        ids.append(token.where(mass > 0, -1))
        left = left.scatter(-1, token, 0.0)
    return torch.cat(ids, dim=-1), torch.stack(drawn_from, dim=1)


def greedy_match(draft_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts while each equals the target's argmax; the target's token follows the last accepted one.

    `draft_ids` [B, N], `target_ids` [B, N + 1] → (number accepted [B], next token [B]). Lossless for greedy decoding.
    """
    matches = (draft_ids == target_ids[:, :-1]).long()  # [B, N]
    accepted = matches.cumprod(dim=-1).sum(dim=-1)
    return accepted, target_ids.gather(-1, accepted[:, None])[:, 0]


def residual_distribution(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, target − draft)): what to sample from after a rejection. [..., V] → [..., V]

    Where the two are equal the residual is empty; a rejection has then probability 0, and the target's own
    distribution stands in for 0/0.
    """
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, residual.div_(mass.clamp(min=_TINY)), target_probs)


def _drawn_from(draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> Tensor:
    """What drafts [B] were drawn from, [B, V]: `draft_probs`, one-hot where None, all 0 where nothing was drafted."""
    drafted = (draft_ids >= 0).to(target_probs.dtype)[:, None]
    if draft_probs is None:
        return torch.zeros_like(target_probs).scatter(-1, draft_ids.clamp(min=0)[:, None], drafted)
    return draft_probs * drafted


def rejection_sample(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft i with probability min(1, target/draft); after a rejection sample the residual distribution.

    `draft_ids` [B, N]; `draft_probs` [B, N, V], or None for deterministic drafts (one-hot, vLLM's default);
    `target_probs` [B, N + 1, V], fp32 → (number accepted [B], next token [B]). Lossless: the output is distributed as
    the target's own (Leviathan et al. 2023, appendix A.1; Chen et al. 2023, theorem 1).
    """
    rows, ids = torch.arange(len(draft_ids), device=draft_ids.device), draft_ids.clamp(min=0)[..., None]
    wanted = target_probs[:, :-1].gather(-1, ids)[..., 0].masked_fill(draft_ids < 0, 0.0)  # [B, N]
    drawn = 1.0 if draft_probs is None else draft_probs.gather(-1, ids)[..., 0]  # [B, N]
    accepted = (uniforms[:, :-1] * drawn < wanted).long().cumprod(dim=-1).sum(dim=-1)
    rejected = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)[rows, accepted]  # [B], −1 where all were accepted
    probs = target_probs[rows, accepted]  # [B, V]
    if draft_probs is not None:
        draft_probs = draft_probs[rows, accepted.clamp(max=draft_ids.shape[1] - 1)]
    residual = residual_distribution(probs, _drawn_from(rejected, draft_probs, probs))
    return accepted, draw(residual, uniforms[:, -1])


def tree_match(draft_ids: Tensor, parents: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`greedy_match` on a tree: go on to the child that equals the target's argmax at this node.

    `draft_ids` [B, N], `target_ids` [B, N + 1] of the newest token and the nodes → (deepest accepted node [B], −1 for
    none; next token [B]). Lossless for greedy decoding.
    """
    return _descend(draft_ids, parents, lambda node: target_ids.gather(-1, node[:, None] + 1)[:, 0])


def tree_sample(
    draft_ids: Tensor, parents: Tensor, logits: Tensor, sampling: SamplingSpec, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw the target's token at a node, and go on to the child that equals it. `logits` [B, N + 1, V], else as
    `tree_match`.

    Every token that is emitted was drawn from the target's own served distribution after the tokens before it, so the
    output is lossless. For deterministic candidates it accepts as often as rejection sampling of one child after the
    other does (naive and multi-step sampling in SpecInfer, Miao et al. 2024, section 4.3): with the mass of the
    children.
    """
    rows = torch.arange(len(draft_ids), device=logits.device)

    def target_token(node: Tensor) -> Tensor:
        return draw(served_probs(logits[rows, node + 1], sampling), uniforms[rows, node + 1])

    return _descend(draft_ids, parents, target_token)


def _descend(draft_ids: Tensor, parents: Tensor, target_token: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """From the newest token to the child that is the target's token there, and on. `target_token`: nodes [B] → [B]."""
    node, parents = torch.full_like(draft_ids[:, 0], -1), parents.to(draft_ids.device)
    token = target_token(node)
    while True:
        hit = (parents == node[:, None]) & (draft_ids == token[:, None])  # [B, N]
        found = hit.any(dim=-1)
        if not bool(found.any()):
            return node, token
        node = torch.where(found, hit.long().argmax(dim=-1), node)
        token = torch.where(found, target_token(node), token)


def tree_rejection_sample(
    draft_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    logits: Tensor,
    sampling: SamplingSpec,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of one sibling after the other, for candidates that were drawn: lossless.

    `draft_probs` [B, N, V]: what each node was drawn from, given the siblings before it (`sample_candidates`);
    `logits` [B, N + 1, V] → (deepest accepted node [B], −1 for none; next token [B]). A rejected sibling leaves the
    residual distribution to the next (multi-step speculative sampling in SpecInfer, Miao et al. 2024, section 4.3;
    without replacement it is the recursive rejection sampling of Jeon et al. 2024).
    """
    rows, (table, most) = torch.arange(len(draft_ids), device=logits.device), children(tuple(parents.tolist()))
    at = torch.full_like(draft_ids[:, 0], -1)  # [B], the node that each row has come to
    probs = served_probs(logits[:, 0], sampling)  # [B, V], what its next token is to be distributed as
    going, table = torch.ones_like(rows, dtype=torch.bool), table.to(logits.device)
    # Level by level, and there one sibling after the other: all rows alike, since asking which are left is a wait
    for count in most:
        left, below = going, table[at + 1]  # [B], [B, most]
        for place in range(count):
            node = below[:, place]
            tried, at_node = left & (node >= 0), node.clamp(min=0)
            accepts, residual = _accept_or_rest(
                draft_ids[rows, at_node], draft_probs[rows, at_node], probs, uniforms[rows, at_node]
            )
            probs = torch.where((tried & ~accepts)[:, None], residual, probs)
            at, left = torch.where(tried & accepts, node, at), left & ~(tried & accepts)
        going = going & ~left
        probs = torch.where(going[:, None], served_probs(logits[rows, at + 1], sampling), probs)
    return at, draw(probs, uniforms[:, -1])


def _accept_or_rest(
    drafts: Tensor, drawn_from: Tensor, target_probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether drafts [B] are accepted, and the residual distribution [B, V] where they are not."""
    ids = drafts.clamp(min=0)[:, None]
    chance = target_probs.gather(-1, ids)[:, 0].masked_fill(drafts < 0, 0.0)
    accepts = uniforms * drawn_from.gather(-1, ids)[:, 0] < chance
    return accepts, residual_distribution(target_probs, _drawn_from(drafts, drawn_from, target_probs))


@dataclass(frozen=True)
class TypicalAcceptance:
    """Thresholds of `typical_accept`, as published with Medusa."""

    epsilon: float = 0.09
    delta: float = 0.3


def typical_accept(
    draft_ids: Tensor,
    parents: Tensor,
    logits: Tensor,
    sampling: SamplingSpec,
    uniforms: Tensor,
    rule: TypicalAcceptance,
) -> tuple[Tensor, Tensor]:
    """Lossy: accept what the target does not find unlikely, p(x) > min(ε, δ · exp(−entropy of p)).

    Of the paths that are accepted in whole the longest, of equally long ones the most probable; then a token drawn
    from the target (Cai et al. 2024, section 2.3.1). The output is not distributed as the target's. Shapes as
    `tree_sample`.
    """
    rows, above = (
        torch.arange(len(draft_ids), device=logits.device)[:, None],
        (parents + 1).to(logits.device),
    )  # [B, 1], [N]
    probs = served_probs(logits, sampling)  # [B, N + 1, V]
    entropy = torch.special.entr(probs).sum(dim=-1)  # [B, N + 1], nats
    threshold = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)[:, above]  # [B, N]
    chance = probs[rows, above, draft_ids.clamp(min=0)].masked_fill(draft_ids < 0, 0.0)  # [B, N]
    lineage = block_attention(parents)[1:, 1:].to(logits.device)  # [N, N], itself and the nodes above it
    accepted = ((chance > threshold)[:, None] | ~lineage).all(dim=-1)  # [B, N]
    joint = torch.where(lineage, chance[:, None], 1.0).prod(dim=-1)  # [B, N], at most 1: it decides among equal depths
    score = torch.where(accepted, lineage.sum(dim=-1) + joint, -1.0)
    best = score.argmax(dim=-1)
    last = torch.where(accepted.any(dim=-1), best, -1)
    return last, draw(probs[rows[:, 0], last + 1], uniforms[:, -1])


def _best(logits: Tensor) -> Tensor:
    """The argmax [..., V] → [...]. On a CPU that of bf16 takes five times as long as a copy in fp32 and that of it."""
    return logits.float().argmax(dim=-1)


def verify(
    logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    parents: Tensor | None,
    sampling: SamplingSpec,
    uniforms: Tensor,
    typical: TypicalAcceptance | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify blocks by the lossless rule that fits them, or by typical acceptance where its thresholds are given.

    `logits` [B, N + 1, V]: the target's after the newest token and after each draft; `draft_ids` [B, N], N ≥ 0;
    `draft_probs` [B, N, V], None for deterministic drafts; `parents` [N], None for a chain, best on the CPU, where
    nothing waits for them. Greedy sampling does not look at `uniforms`. Returns (last accepted draft [B], −1 for none;
    the target's token after it [B]).
    """
    if typical is not None and draft_ids.shape[1]:
        nodes = torch.arange(-1, draft_ids.shape[1] - 1) if parents is None else parents
        return typical_accept(draft_ids, nodes, logits, sampling, uniforms, typical)
    if parents is not None:
        if sampling.is_greedy:
            return tree_match(draft_ids, parents, _best(logits))
        if draft_probs is None:
            return tree_sample(draft_ids, parents, logits, sampling, uniforms)
        return tree_rejection_sample(draft_ids, parents, draft_probs, logits, sampling, uniforms)
    if sampling.is_greedy:
        accepted, following = greedy_match(draft_ids, _best(logits))
    else:
        probs = served_probs(logits, sampling)
        accepted, following = rejection_sample(draft_ids, draft_probs, probs, uniforms)
    return accepted - 1, following
