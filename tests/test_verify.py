"""The acceptance rules row by row, no 0/0, and the served distribution as transformers warps it.

That the rules are lossless in distribution is shown in test_lossless.py.
"""

import pytest
import torch
from conftest import make_tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdist.drafters.base import DecodeContext
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.errors import ConfigError
from specdist.schema import SamplingSpec
from specdist.tree import DraftTree
from specdist.verify import (
    TypicalAcceptance,
    draw,
    greedy_match,
    rejection_sample,
    residual_distribution,
    sample_candidates,
    served_logprobs,
    tree_match,
    typical_accept,
    uniform_numbers,
    verify,
)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.8, 0, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (0.7, 0, 0.6, 0.0),
        (1.0, 7, 0.8, 0.0),
        (1.4, 0, 1.0, 0.1),
        (2.0, 9, 0.9, 0.2),
    ],
)
def test_served_logprobs_equal_transformers_warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    for value, off, warper in (
        (top_k, 0, TopKLogitsWarper),
        (top_p, 1.0, TopPLogitsWarper),
        (min_p, 0, MinPLogitsWarper),
    ):
        if value != off:
            expected = warper(value)(None, expected)
    served = served_logprobs(logits, SamplingSpec(temperature, top_k, top_p, min_p=min_p))
    torch.testing.assert_close(served, expected.log_softmax(-1))


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_top_p_equals_a_sort_of_the_whole_vocabulary(scale: float) -> None:
    """From flat, where the nucleus is most of the vocabulary, to peaked; scores are coarse, so many are equal."""
    logits = (torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * scale).bfloat16().float()
    for top_p in (0.05, 0.5, 0.9, 0.99):
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().softmax(-1)
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < top_p)
        served = served_logprobs(logits, SamplingSpec(1.0, top_p=top_p))
        differ = (served.isfinite() != kept).sum(-1)
        assert differ.max() <= 1  # the token at which rounding decides
        assert torch.equal(served[differ == 0], logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[differ == 0])


def test_served_logprobs_refuse_temperature_zero() -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        served_logprobs(torch.zeros(3), SamplingSpec(0.0))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).expand(20_000, 5)
    drawn = draw(probs, uniform_numbers((20_000,), torch.Generator().manual_seed(0)))
    assert set(drawn.tolist()) == {1, 3}
    assert abs((drawn == 1).float().mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], (3, 8)),
        ([5, 6, 7], [4, 6, 7, 8], (0, 4)),
        ([5, 9, 7], [5, 6, 7, 8], (1, 6)),
        ([5, -1, -1], [5, 6, 7, 8], (1, 6)),
        ([], [3], (0, 3)),
    ],
)
def test_greedy_match(draft: list[int], target: list[int], expected: tuple[int, int]) -> None:
    accepted, following = greedy_match(torch.tensor([draft], dtype=torch.long), torch.tensor([target]))
    assert (int(accepted), int(following)) == expected


def test_residual_of_equal_distributions_is_no_zero_by_zero() -> None:
    probs = torch.tensor([0.25, 0.75])
    assert torch.equal(residual_distribution(probs, probs), probs)


def test_draft_equal_to_target_is_always_accepted() -> None:
    probs = torch.full((100, 4, 8), 1 / 8)
    drafts = torch.tensor([1, 5, 7]).expand(100, 3)
    uniforms = uniform_numbers((100, 4), torch.Generator().manual_seed(0))
    assert rejection_sample(drafts, probs[:, :3], probs, uniforms)[0].tolist() == [3] * 100


@pytest.mark.parametrize("rule", ["sampled", "one-hot", "greedy", "typical"])
@pytest.mark.parametrize("tree", [None, DraftTree.of([[0], [1], [0, 0], [0, 1], [1, 0]], 2)], ids=["chain", "tree"])
def test_e17_a_row_of_a_batch_is_verified_as_it_is_alone(tree: DraftTree | None, rule: str) -> None:
    """Rows accept independently, those that draft less than others as well."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_drafts, vocab = 64, 5, 6
    logits, draft_logits = torch.randn(2, num_rows, num_drafts + 1, vocab, generator=generator)
    probs = draft_logits[:, 1:].softmax(-1) if rule == "sampled" else None
    ids = torch.randint(vocab, (num_rows, num_drafts), generator=generator)
    ids[::3, 3:] = -1
    uniforms = uniform_numbers((num_rows, num_drafts + 1), generator)
    parents = None if tree is None else torch.tensor(tree.parents)
    sampling = SamplingSpec(0.0 if rule == "greedy" else 0.8)
    typical = TypicalAcceptance() if rule == "typical" else None

    def run(rows: slice) -> list[list[int]]:
        own = None if probs is None else probs[rows]
        found = verify(logits[rows], ids[rows], own, parents, sampling, uniforms[rows], typical)
        return torch.stack(found, dim=-1).tolist()

    together = run(slice(None))
    assert together == [run(slice(i, i + 1))[0] for i in range(num_rows)]
    assert len({last for last, _ in together}) > 2, "the test must see blocks that are accepted to unlike depths"
    assert all(last < 3 for last, _ in together[::3])


def test_candidates_are_distinct_and_stop_where_none_is_left() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 1.0, 0.0, 0.0]]).repeat(500, 1)
    ids, drawn_from = sample_candidates(probs, uniform_numbers((1000, 4), torch.Generator().manual_seed(0)))
    assert all(sorted(row) == [-1, 0, 2, 3] and row[-1] == -1 for row in ids[::2].tolist())
    assert ids[1::2].tolist() == [[1, -1, -1, -1]] * 500
    assert drawn_from.isfinite().all()
    second = drawn_from[::2, 1]
    first = ids[::2, :1]
    torch.testing.assert_close(second, probs[::2].scatter(-1, first, 0) / (1 - probs[::2].gather(-1, first)))


def test_typical_acceptance_takes_the_longest_path_and_of_equally_long_ones_the_most_probable() -> None:
    tree = DraftTree.of([[0], [1], [2], [0, 0], [1, 0]], 2)
    probs = torch.tensor(
        [[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.02, 0.08, 0.9], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [1, 0, 0]]
    )
    block = (torch.tensor(tree.parents), probs.log()[None], SamplingSpec(1.0), torch.zeros(1, 6), TypicalAcceptance())
    # after the second child its own child has .08, below min(.09, .3 exp(−.39)); the first's has .9
    assert int(typical_accept(torch.tensor([[0, 1, 2, 0, 1]]), *block)[0]) == 3
    assert int(typical_accept(torch.tensor([[0, 1, 2, 0, 2]]), *block)[0]) == 3  # .5 · .9 against .3 · .9
    assert int(typical_accept(torch.tensor([[0, 1, 2, 1, 2]]), *block)[0]) == 4
    assert int(typical_accept(torch.tensor([[0, 1, 2, 1, 1]]), *block)[0]) == 0


# Of the newest token the children 5 and 6; of 5 again 6, and below that 7; of 6 the child 5
TREE_IDS, TREE_PARENTS = torch.tensor([[5, 6, 6, 5, 7]]), torch.tensor([-1, -1, 0, 1, 2])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([5, 6, 0, 7, 0, 9], (4, 9)),
        ([6, 0, 5, 0, 8, 0], (3, 8)),
        ([5, 7, 0, 0, 0, 0], (0, 7)),
        ([7, 6, 6, 6, 6, 6], (-1, 7)),
    ],
)
def test_tree_match(target: list[int], expected: tuple[int, int]) -> None:
    last, following = tree_match(TREE_IDS, TREE_PARENTS, torch.tensor([target]))
    assert (int(last), int(following)) == expected


def test_tree_match_of_a_chain_is_greedy_match() -> None:
    draft, chain = torch.tensor([[5, 6, 7]]).expand(3, 3), torch.tensor([-1, 0, 1])
    target = torch.tensor([[5, 6, 7, 8], [4, 6, 7, 8], [5, 6, 9, 8]])
    last, following = tree_match(draft, chain, target)
    accepted, expected = greedy_match(draft, target)
    assert torch.equal(last + 1, accepted)
    assert torch.equal(following, expected)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: a number that is asked for, and places that are looked for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select"))
        return func(*args, **(kwargs or {}))


def test_a_drawn_tree_is_verified_without_a_wait_for_each_node() -> None:
    tree = DraftTree.of([[i] for i in range(8)] + [[i, j] for i in range(8) for j in range(7)], 2)
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 64, 16, generator=generator).softmax(-1)
    ids = draw(probs, uniform_numbers((3, 64), generator))
    logits, uniforms = torch.randn(3, 65, 16, generator=generator), uniform_numbers((3, 65), generator)
    with Waits() as waits:
        last, _ = verify(logits, ids, probs, torch.tensor(tree.parents), SamplingSpec(1.0), uniforms)
    assert waits.count == 0
    assert (last >= 0).any()


def test_a_draft_model_drafts_a_block_without_a_wait_for_each_token() -> None:
    drafter = DraftModelDrafter(make_tiny_llama(20), 20)
    for sampling in (None, SamplingSpec(0.8)):
        counts = []
        for length in (2, 6):
            drafter.reset()
            with Waits() as waits:
                context = DecodeContext([3, 4], sampling, torch.Generator().manual_seed(0))
                assert len(drafter.propose(context, length).token_ids) == length
            counts.append(waits.count)
        assert counts[0] == counts[1]
