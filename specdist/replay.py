"""Owns acceptance replay: the counters of speculative decoding, computed from texts that the target already wrote.

Shapes: B texts, T tokens of the longest completion, γ drafted tokens of a block. Pure torch, no model is called here.

A text is the completion x[0], …, x[L−1]. x[0] comes from the prefill; drafting starts at s = 1. A block at s drafts
min(γ, L − s) tokens, fewer where the drafter has no more to propose: `accept` is then −1 from there on.
`accept[b, s, j]` is the probability that the draft for x[s+j] is accepted, given that all before it in
the block were, and *given the text*: 0 or 1 with greedy drafts (does the draft equal the text?), min(1, q/p)
where the draft was sampled from q and the text from p. Given the text these events are independent, so the block starts
form a Markov chain and the expected counters have no noise from the accept/reject draws. On greedy text they are the
exact counts of the real decoder. After EOS or the token limit nothing is drafted and no bonus token is emitted.
"""

import torch
from torch import Tensor

from specdist.tree import MAX_RANK, DraftTree


def chain_accept(per_position: Tensor, num_speculative_tokens: int) -> Tensor:
    """Spread acceptances that do not depend on the block's start over (start, offset): [B, T] → [B, T, γ].

    For a draft model the draft of x[t] depends on x[<t] alone, so accept[b, s, j] = per_position[b, s + j].
    """
    padded = torch.nn.functional.pad(per_position, (0, num_speculative_tokens - 1))
    return padded.unfold(1, num_speculative_tokens, 1)  # [B, T, γ]


def tree_accept(ranks: Tensor, tree: DraftTree) -> Tensor:
    """Acceptance of a tree's levels, 0 or 1: is the path of ranks down to this depth a node? [..., H] → [..., depth]

    `ranks` as `HeadsScorer.ranks` gives them. With it `replay` and `greedy_steps` work on a tree as on a chain of
    γ = depth: the accepted path goes on as long as a node holds the text's token. Drafted tokens are then levels.
    """
    dead = tree.num_nodes + 1  # states: 0 the newest token, i + 1 node i
    following = torch.full((dead + 1, MAX_RANK + 1), dead)
    for node, (path, parent) in enumerate(zip(tree.paths, tree.parents, strict=True)):
        following[parent + 1, path[-1]] = node + 1
    state, alive = torch.zeros(ranks.shape[:-1], dtype=torch.long), []
    for depth in range(tree.depth):
        state = following[state, ranks[..., depth]]
        alive.append(state != dead)
    return torch.stack(alive, dim=-1).float()


def replay(accept: Tensor, lengths: Tensor, num_speculative_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expected counters of every text at draft length γ.

    `accept` [B, T, ≥ γ] with values in [0, 1], or −1 where nothing is drafted (what lies past the text's end is
    ignored), `lengths` [B] in tokens.
    Returns num_drafts [B], num_draft_tokens [B] and accepted_at_position [B, γ], in float64.

    visit(s+j+1) += visit(s) · Π_{i<j} a(s,i) · (1 − a(s,j)), and visit(s+γ+1) += visit(s) · Π_{i<γ} a(s,i).
    """
    batch, horizon, offsets = accept.shape
    gamma = num_speculative_tokens
    if not 1 <= gamma <= offsets:
        raise ValueError(f"num_speculative_tokens {gamma}: the acceptances cover 1 to {offsets}")
    proposed, probability = accept >= 0, accept.clamp(min=0).double()
    visit = torch.zeros(batch, horizon + gamma + 1, dtype=torch.float64)
    visit[:, 1] = 1.0
    drafts = torch.zeros(batch, dtype=torch.float64)
    drafted = torch.zeros(batch, dtype=torch.float64)
    accepted = torch.zeros(batch, gamma, dtype=torch.float64)
    for start in range(1, horizon):
        reach = visit[:, start] * (start < lengths)  # probability that a block starts here and its run goes on
        drafts += reach
        for j in range(gamma):
            live = start + j < lengths
            drafted += visit[:, start] * live * proposed[:, start, j]
            step = probability[:, start, j] * live
            # what is rejected restarts after the target's own token; past the end `live` is False and nothing restarts
            visit[:, start + j + 1] += reach * live * (1.0 - step)
            reach = reach * step
            accepted[:, j] += reach
        visit[:, start + gamma + 1] += reach
    return drafts, drafted, accepted


def draw_counts(
    accept: Tensor, length: int, num_speculative_tokens: int, draws: int, generator: torch.Generator
) -> Tensor:
    """Counters of `draws` decodings that would all have written this text: [draws, 2], float64.

    `accept` [L, ≥ γ] as in `replay`. A row holds num_accepted_tokens and num_drafts: one walk of the chain whose
    expectations `replay` gives, so these are all that a right decoder can count, as often as it would.
    """
    offsets = torch.arange(num_speculative_tokens)
    inside = torch.arange(len(accept))[:, None] + offsets < length  # [L, γ]
    # P(at least j + 1 drafts of a block at s are accepted)
    survival = (accept[:, :num_speculative_tokens].clamp(min=0).double() * inside).cumprod(dim=-1)  # [L, γ]
    start, counts = torch.ones(draws, dtype=torch.long), torch.zeros(draws, 2, dtype=torch.float64)
    while bool((going := start < length).any()):
        uniforms = torch.rand(draws, 1, generator=generator, dtype=torch.float64)
        run = (uniforms < survival[start.clamp(max=length - 1)]).sum(dim=-1) * going  # [draws]
        counts += torch.stack([run, going], dim=-1)
        start += run + 1
    return counts


def greedy_steps(accept: Tensor, length: int, num_speculative_tokens: int) -> list[tuple[int, int, int]]:
    """The verify steps of greedy decoding over one text: (start, tokens drafted, tokens accepted) of each.

    `accept` [L, ≥ γ] of zeros and ones, −1 where nothing is drafted. It is the walk whose sums `replay` gives.
    """
    steps, start = [], 1
    while start < length:
        block = accept[start, : min(num_speculative_tokens, length - start)]
        drafted = int((block >= 0).sum())
        accepted = int(block[:drafted].long().cumprod(dim=0).sum())
        steps.append((start, drafted, accepted))
        start += accepted + 1
    return steps
