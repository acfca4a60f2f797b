"""The output has the target's distribution, to the joint one of two tokens: χ² over 200,000 draws of each rule.

Target and draft are tiny random Llamas over 5 tokens; their logits after every text of up to two tokens make a table.
Each row of a batch is one text, decoded by `verify` until it has two tokens. The same test must reject a lossy rule,
and rules with an error that is easily made.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from conftest import make_tiny_llama
from torch import Tensor

from specdist import verify as rules
from specdist.schema import SamplingSpec
from specdist.tree import DraftTree
from specdist.verify import TypicalAcceptance, sample_candidates, served_logprobs, uniform_numbers, verify

VOCAB, DRAWS, P_VALUE = 5, 200_000, 0.001
ENOUGH = 40_000  # draws that show an error, by far: p below 1e−9
PROMPT = [1, 2]
TREE = DraftTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0]], 2)
CHAIN = DraftTree.chain(2)
SAMPLINGS = [SamplingSpec(0.5), SamplingSpec(1.0), SamplingSpec(1.3), SamplingSpec(1.0, top_p=0.8)]


@cache
def table(seed: int) -> Tensor:
    """Logits after each text: row 0 after none, 1 + a after token a, 6 + 5 a + b after a and b: [31, V]."""
    texts = [[], *([a] for a in range(VOCAB)), *([a, b] for a in range(VOCAB) for b in range(VOCAB))]
    model = make_tiny_llama(VOCAB, hidden=16, seed=seed)
    with torch.inference_mode():
        return torch.stack([0.6 * model(torch.tensor([PROMPT + text])).logits[0, -1] for text in texts])


def after(context: Tensor, token: Tensor) -> Tensor:
    """Number of the text that follows `context` with `token`; where there is no token, or no longer text, any does."""
    return (context * VOCAB + token.clamp(min=0) + 1).clamp(max=VOCAB + VOCAB * VOCAB)


@dataclass(frozen=True)
class Draft:
    """How blocks are drafted. `told`: other probabilities than the true ones for verification, to plant an error."""

    tree: DraftTree
    sampled: bool
    sampling: SamplingSpec
    told: Callable[[Tensor], Tensor] | None = None
    confidence: float = 0.0
    drops_unlikely: bool = False

    def block(self, logits: Tensor, context: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Drafts [B, N] after texts `context` [B] from the table `logits`, and what they were drawn from, [B, N, V]."""
        numbers, ids, probs, index = [context], [], [], {(): 0}
        for path in self.tree.paths:
            index[path] = len(numbers)
            if path[-1] == 0:  # its siblings are drawn together
                count = sum(other[:-1] == path[:-1] for other in self.tree.paths)
                parent = numbers[index[path[:-1]]]
                chosen, drawn_from = self._candidates(logits, parent, count, generator)
            ids.append(chosen[:, path[-1]])
            probs.append(drawn_from[:, path[-1]])
            numbers.append(after(parent, ids[-1]))
        drafted = torch.stack(ids, dim=-1)
        if self.confidence:
            first = probs[0].gather(-1, drafted[:, :1])[:, 0]
            drafted[:, 0 if self.drops_unlikely else 1].masked_fill_(first < self.confidence, -1)
        return drafted, torch.stack(probs, dim=1) if self.sampled else None

    def _candidates(self, logits: Tensor, context: Tensor, count: int, generator: torch.Generator):
        if not self.sampled:
            best = logits.topk(count, dim=-1).indices[context]
            return best, best[..., None]
        probs, uniforms = (
            served_logprobs(logits, self.sampling).exp()[context],
            uniform_numbers((len(context), count), generator),
        )
        ids, drawn_from = sample_candidates(probs, uniforms)
        return ids, drawn_from if self.told is None else self.told(logits)[context][:, None]


def two_tokens(
    draft: Draft, sampling: SamplingSpec, typical: TypicalAcceptance | None = None, draws: int = DRAWS
) -> Tensor:
    """Counts of the 25 pairs of first tokens that decoding emits, over so many texts: [V · V]."""
    generator = torch.Generator().manual_seed(0)
    target, drafter = table(3), table(4).clone()
    drafter[:, 4] = -torch.inf  # the draft never proposes a token that the target does
    context, emitted = torch.zeros(draws, dtype=torch.long), torch.full((draws, 2), -1)
    parents = torch.tensor(draft.tree.parents)
    while bool((rows := (emitted[:, 1] < 0).nonzero()[:, 0]).numel()):
        ids, probs = draft.block(drafter, context[rows], generator)
        nodes = [context[rows]]
        for node, parent in enumerate(draft.tree.parents):
            nodes.append(after(nodes[parent + 1], ids[:, node]))
        chain = draft.tree is CHAIN
        last, following = verify(
            target[torch.stack(nodes, dim=1)],
            ids,
            probs,
            None if chain else parents,
            sampling,
            uniform_numbers((len(rows), len(nodes)), generator),
            typical,
        )
        path = [torch.where(last < 0, -1, parents[last]), last]  # up to two nodes, −1 where none
        for node in path:
            _emit(emitted, rows, torch.where(node < 0, -1, ids.gather(-1, node.clamp(min=0)[:, None])[:, 0]))
        _emit(emitted, rows, following)
        context = after(torch.zeros_like(context), emitted[:, 0])
    return torch.bincount(emitted[:, 0] * VOCAB + emitted[:, 1], minlength=VOCAB * VOCAB).float()


def _emit(emitted: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Put `tokens` [R] after what `rows` have; −1 is none, and a third is not looked at."""
    place = (emitted[rows] >= 0).sum(dim=-1)
    wanted = (tokens >= 0) & (place < 2)
    emitted[rows[wanted], place[wanted]] = tokens[wanted]


def p_value(counts: Tensor, sampling: SamplingSpec) -> float:
    """Of the χ² test that pairs with `counts` were drawn from the target; rare pairs are counted together."""
    probs = served_logprobs(table(3).double(), sampling).exp().double()
    expected = (probs[0][:, None] * probs[1 : 1 + VOCAB]).flatten() * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    rare = (expected < 5) & (expected > 0)
    observed, expected = (
        torch.cat([values[expected >= 5], values[rare].sum()[None]]) for values in (counts.double(), expected)
    )
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return float(torch.special.gammaincc((keep.sum() - 1) / 2, statistic / 2))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["t0.5", "t1", "t1.3", "t1-top_p0.8"])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_two_tokens_have_the_targets_joint_distribution(tree: DraftTree, sampled: bool, sampling: SamplingSpec) -> None:
    counts = two_tokens(Draft(tree, sampled, sampling), sampling)
    assert p_value(counts, sampling) > P_VALUE


def test_filters_of_the_target_hold_for_a_draft_without_them() -> None:
    for tree, sampling in ((CHAIN, SamplingSpec(1.3, top_k=3)), (TREE, SamplingSpec(1.0, min_p=0.3))):
        counts = two_tokens(Draft(tree, True, SamplingSpec(1.0)), sampling)
        assert p_value(counts, sampling) > P_VALUE
        assert bool((counts == 0).any()), "the filter must leave something out"


def test_a_block_that_ends_after_an_unlikely_draft_is_lossless_and_one_that_drops_it_is_not() -> None:
    sampling = SamplingSpec(1.0)
    draft = Draft(CHAIN, True, sampling, confidence=0.3)
    assert p_value(two_tokens(draft, sampling), sampling) > P_VALUE
    assert p_value(two_tokens(replace(draft, drops_unlikely=True), sampling, draws=ENOUGH), sampling) < 1e-9


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_typical_acceptance_is_found_to_be_lossy(tree: DraftTree) -> None:
    sampling = SamplingSpec(1.0)
    for sampled in (True, False):
        counts = two_tokens(Draft(tree, sampled, sampling), sampling, TypicalAcceptance(), ENOUGH)
        assert p_value(counts, sampling) < 1e-9


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_wrong_residual_is_found(tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the target's own distribution is taken: the usual mistake."""
    sampling = SamplingSpec(1.0)
    monkeypatch.setattr(rules, "residual_distribution", lambda target_probs, draft_probs: target_probs)
    assert p_value(two_tokens(Draft(tree, True, sampling), sampling, draws=ENOUGH), sampling) < 1e-9


def test_a_temperature_that_the_drafts_probabilities_lack_is_found() -> None:
    sampling = SamplingSpec(0.5)
    draft = Draft(CHAIN, True, sampling, told=lambda logits: logits.softmax(dim=-1))
    assert p_value(two_tokens(draft, sampling, draws=ENOUGH), sampling) < 1e-9
