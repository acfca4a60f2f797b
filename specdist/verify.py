"""Owns the acceptance rules of speculative decoding, and the one definition of the distribution that is served.

Shapes: N drafted tokens of a block, V vocabulary. Pure torch, fp32 inside; no model is called here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdist.errors import ConfigError
from specdist.schema import SamplingSpec

_NUCLEUS_SIZE = 128  # tokens that are looked at first for top-p: enough for nearly every row


def served_logprobs(logits: Tensor, sampling: SamplingSpec) -> Tensor:
    """Log-probabilities that the server samples from: temperature, then top-k, then top-p. fp32, −inf where filtered.

    `logits` [..., V] → [..., V]. The order is that of transformers and vLLM; top-p keeps the smallest set of most
    probable tokens whose mass reaches `top_p` (Holtzman et al. 2020). Raises ConfigError at temperature 0, where the
    served choice is the argmax and not a distribution.
    """
    if sampling.is_greedy:
        raise ConfigError("temperature 0 has no distribution to sample from: take the argmax of the logits instead")
    scores = logits.float() / sampling.temperature  # [..., V]
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k, dim=-1).values[..., -1:]  # [..., 1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        scores = scores.masked_fill(~_nucleus(scores, sampling.top_p), -torch.inf)
    return scores.log_softmax(dim=-1)


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


def sample(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token from each row of `probs` [..., V] by the inverse of its distribution function: [...].

    One uniform number per row, so a row's draw depends on its generator alone. A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(dim=-1)
    uniform = torch.rand(probs.shape[:-1], generator=generator, dtype=torch.float64, device=generator.device)
    # 1 − u lies in (0, 1]: a threshold of 0 would select a leading token of probability 0
    threshold = (1.0 - uniform.to(probs.device)).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold).squeeze(-1)


def greedy_match(draft_ids: Tensor, target_ids: Tensor) -> tuple[int, int]:
    """Accept drafts while each equals the target's argmax; the target's token follows the last accepted one.

    `draft_ids` [N], `target_ids` [N + 1] → (number accepted, next token). Lossless for greedy decoding.
    """
    matches = (draft_ids == target_ids[:-1]).long()
    accepted = int(matches.cumprod(dim=0).sum())
    return accepted, int(target_ids[accepted])


def residual_distribution(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, target − draft)): what to sample from after a rejection. [V] → [V]

    Where the two are equal the residual is empty; a rejection has then probability 0, and the target's own
    distribution stands in for 0/0.
    """
    residual = (target_probs - draft_probs).clamp(min=0.0)
    mass = residual.sum()
    return residual / mass if mass > 0 else target_probs


def rejection_sample(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Accept draft i with probability min(1, target/draft); after a rejection sample the residual distribution.

    `draft_ids` [N]; `draft_probs` [N, V], or None for deterministic drafts (one-hot, vLLM's default);
    `target_probs` [N + 1, V], fp32 → (number accepted, next token). Lossless: the output is distributed as the
    target's own (Leviathan et al. 2023, appendix A.1; Chen et al. 2023, theorem 1).
    """
    uniforms = torch.rand(len(draft_ids), generator=generator, dtype=torch.float64, device=generator.device)
    for i, token in enumerate(draft_ids.tolist()):
        draft_prob = 1.0 if draft_probs is None else float(draft_probs[i, token])
        if float(uniforms[i]) * draft_prob < float(target_probs[i, token]):
            continue
        if draft_probs is None:
            draft_row = torch.zeros_like(target_probs[i])
            draft_row[token] = 1.0
        else:
            draft_row = draft_probs[i]
        return i, int(sample(residual_distribution(target_probs[i], draft_row), generator))
    return len(draft_ids), int(sample(target_probs[-1], generator))


def tree_match(draft_ids: Tensor, parents: Tensor, target_ids: Tensor) -> tuple[list[int], int]:
    """`greedy_match` on a tree: go on to the child that equals the target's argmax at this node.

    `draft_ids` [N], `parents` [N] (−1: the newest token), `target_ids` [N + 1] of the newest token and the nodes →
    (accepted nodes from the top, next token). Lossless for greedy decoding.
    """
    targets = target_ids.tolist()
    return _descend(draft_ids, parents, lambda node: targets[node + 1])


def tree_sample(
    draft_ids: Tensor, parents: Tensor, logits: Tensor, sampling: SamplingSpec, generator: torch.Generator
) -> tuple[list[int], int]:
    """Draw the target's token at a node, and go on to the child that equals it: as `tree_match`, `logits` [N + 1, V].

    Every token that is emitted was drawn from the target's own served distribution after the tokens before it, so the
    output is lossless. For deterministic candidates it accepts as often as rejection sampling of one child after the
    other does (naive and multi-step sampling in SpecInfer, Miao et al. 2024, section 4.3): with the mass of the
    children. Medusa's typical acceptance (Cai et al. 2024, section 2.3.1) accepts more and is lossy.
    """

    def draw(node: int) -> int:
        return int(sample(served_logprobs(logits[node + 1], sampling).exp(), generator))

    return _descend(draft_ids, parents, draw)


def _descend(draft_ids: Tensor, parents: Tensor, target_token: Callable[[int], int]) -> tuple[list[int], int]:
    edges = zip(parents.tolist(), draft_ids.tolist(), strict=True)
    child = {edge: node for node, edge in enumerate(edges)}  # by parent and token
    path, token = [], target_token(-1)
    node = child.get((-1, token))
    while node is not None:
        path.append(node)
        token = target_token(node)
        node = child.get((node, token))
    return path, token
