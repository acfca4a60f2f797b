"""Replay against brute force: every sequence of accept/reject draws of a text, weighted by its probability."""

import itertools

import pytest
import torch

from specdist.replay import chain_accept, draw_counts, greedy_steps, replay


def brute_force(accept: torch.Tensor, length: int, gamma: int) -> tuple[float, float, list[float]]:
    """Expected counters by enumerating, block by block, how many drafts are accepted."""
    drafts, drafted, at_position = 0.0, 0.0, [0.0] * gamma
    pending = [(1, 1.0)]
    while pending:
        start, weight = pending.pop()
        if start >= length or weight == 0.0:
            continue
        block = min(gamma, length - start)
        drafts += weight
        drafted += weight * block
        for run in range(block + 1):
            probability = float(torch.prod(accept[start, :run]))
            if run < block:
                probability *= 1.0 - float(accept[start, run])
            for i in range(run):
                at_position[i] += weight * probability
            pending.append((start + run + 1, weight * probability))
    return drafts, drafted, at_position


@pytest.mark.parametrize(("length", "gamma"), list(itertools.product([2, 3, 7], [1, 2, 4])))
def test_replay_equals_enumeration(length: int, gamma: int) -> None:
    accept = torch.rand(
        length, gamma, generator=torch.Generator().manual_seed(length * 10 + gamma), dtype=torch.float64
    )
    drafts, drafted, accepted = replay(accept[None], torch.tensor([length]), gamma)
    expected = brute_force(accept, length, gamma)
    assert drafts.item() == pytest.approx(expected[0])
    assert drafted.item() == pytest.approx(expected[1])
    assert accepted[0].tolist() == pytest.approx(expected[2])


@pytest.mark.parametrize(("length", "gamma"), [(2, 2), (7, 1), (7, 3)])
def test_drawn_counts_are_spread_as_enumeration_says(length: int, gamma: int) -> None:
    accept = torch.rand(length + 2, gamma, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    accept[length - 1] = -1.0  # nothing is drafted there
    drawn = draw_counts(accept, length, gamma, 100_000, torch.Generator().manual_seed(0))
    pairs: dict[tuple[int, int], float] = {}
    pending = [(1, 0, 0, 1.0)]
    while pending:
        start, accepted, drafts, weight = pending.pop()
        if start >= length:
            pairs[accepted, drafts] = pairs.get((accepted, drafts), 0.0) + weight
            continue
        chances = accept[start, : length - start].clamp(min=0).tolist()
        for run in range(len(chances) + 1):
            pending.append((start + run + 1, accepted + run, drafts + 1, weight * (1 - ([*chances, 0.0])[run])))
            weight *= ([*chances, 0.0])[run]
    assert {(int(a), int(d)) for a, d in drawn.unique(dim=0).tolist()} <= {pair for pair in pairs if pairs[pair] > 0}
    for pair, probability in pairs.items():
        share = (drawn == torch.tensor(pair)).all(dim=-1).double().mean().item()
        assert share == pytest.approx(probability, abs=0.006)


def test_texts_of_unequal_length_do_not_disturb_each_other() -> None:
    accept = torch.rand(3, 9, 3, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 4, 2])
    together = replay(accept, lengths, 3)
    for i, length in enumerate(lengths.tolist()):
        alone = replay(accept[i : i + 1, :length], lengths[i : i + 1], 3)
        for whole, part in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1], part)


def test_greedy_counts_are_the_sums_of_the_walk_and_emit_the_whole_text() -> None:
    accept = (torch.rand(40, 5, generator=torch.Generator().manual_seed(3)) < 0.6).float()
    steps = greedy_steps(accept, 40, 5)
    drafts, drafted, accepted = replay(accept[None], torch.tensor([40]), 5)
    assert drafts.item() == len(steps)
    assert drafted.item() == sum(step[1] for step in steps)
    assert accepted[0].tolist() == [sum(step[2] > i for step in steps) for i in range(5)]
    ends_without_bonus = steps[-1][1] == steps[-1][2]
    assert sum(step[2] + 1 for step in steps) - ends_without_bonus == 40 - 1  # the first token is the prefill's


def test_e16_independent_acceptance_gives_the_closed_form() -> None:
    """α = 0.8, γ = 4: 2.3616 accepted and 3.3616 emitted per step, far from the text's end."""
    accept = chain_accept(torch.full((1, 4000), 0.8, dtype=torch.float64), 4)
    drafts, _, accepted = replay(accept, torch.tensor([4000]), 4)
    assert accepted.sum().item() / drafts.item() == pytest.approx(2.3616, abs=2e-3)


def test_e16_conditional_accuracies_become_unconditional_rates() -> None:
    """.8, .6, .5 given acceptance so far: .8 + .48 + .24 = 1.52 accepted per step."""
    accept = torch.tensor([0.8, 0.6, 0.5], dtype=torch.float64).expand(1, 4000, 3)
    drafts, _, accepted = replay(accept, torch.tensor([4000]), 3)
    torch.testing.assert_close(
        accepted[0] / drafts, torch.tensor([0.8, 0.48, 0.24], dtype=torch.float64), atol=1e-3, rtol=0
    )


def test_chain_accept_reads_the_acceptance_of_the_drafted_position() -> None:
    spread = chain_accept(torch.tensor([[0.0, 0.1, 0.2, 0.3]]), 3)
    torch.testing.assert_close(spread[0, 1], torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(spread[0, 3], torch.tensor([0.3, 0.0, 0.0]))


def test_a_draft_length_beyond_the_acceptances_is_refused() -> None:
    with pytest.raises(ValueError, match="cover 1 to 2"):
        replay(torch.zeros(1, 4, 2), torch.tensor([4]), 3)
