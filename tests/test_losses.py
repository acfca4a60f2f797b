"""The fused losses against the eager ones: values and gradients, tight in fp32, tolerant in bf16, at every extreme."""

from dataclasses import replace

import pytest
import torch

from specdist import fused_losses
from specdist.fused_losses import Sizes, heads_objective, linear_objective
from specdist.losses import (
    IGNORED,
    FullTarget,
    Objective,
    Projection,
    TopTarget,
    cross_entropy,
    forward_kl,
    jensen_shannon,
    negative_log_acceptance,
    position_losses,
    reverse_kl,
    total_variation,
)
from specdist.objective import CROSS_ENTROPY, DIVERGENCES, OVERLAPS

V, D = 50, 16
MIXTURE = Objective({CROSS_ENTROPY: 0.3, "forward_kl": 0.5, "negative_log_acceptance": 2.0}, temperature=0.7)
OBJECTIVES = [Objective({name: 1.0}, temperature=0.7, beta=0.3) for name in (CROSS_ENTROPY, *DIVERGENCES)] + [MIXTURE]


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, tiles and blocks that do not divide the positions, the chunk or the vocabulary."""
    for name in ("CPU", "CPU_OWN"):
        monkeypatch.setattr(fused_losses, name, Sizes(chunk=5, tile=2 * V, block=16))


def name_of(objective: Objective) -> str:
    return "+".join(objective.weights)


def draft_side(positions: int, *, scale: float = 1.0, weight_grad: bool = True, bias: bool = False):
    generator = torch.Generator().manual_seed(positions)
    hidden = (scale * torch.randn(positions, D, generator=generator)).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_(weight_grad)
    offset = torch.randn(V, generator=generator).requires_grad_() if bias else None
    labels = torch.randint(0, V, (positions,), generator=generator)
    return hidden, Projection(weight, offset), labels


def full_target(positions: int, *, scale: float = 1.0, size: int = 24) -> FullTarget:
    generator = torch.Generator().manual_seed(1000 + positions)
    hidden = scale * torch.randn(positions, size, generator=generator)
    return FullTarget(hidden, Projection(0.5 * torch.randn(V, size, generator=generator)))


def top_target(full: FullTarget, best: int) -> TopTarget:
    logprobs = full.logprobs(slice(None), 1.0)
    top = logprobs.topk(best, dim=-1)
    return TopTarget(top.indices, top.values, logprobs.exp().scatter(-1, top.indices, 0.0).sum(dim=-1))


def eager(hidden, projection, labels, objective, target):
    logits = projection.logits(hidden @ projection.weight.T)
    terms = position_losses(objective, logits, labels, target, slice(None)).sum(dim=-1)
    return (terms * torch.tensor(list(objective.weights.values()))).sum(), terms


def gradients(loss: torch.Tensor, hidden: torch.Tensor, projection: Projection) -> list[torch.Tensor]:
    leaves = [t for t in (hidden, projection.weight, projection.bias) if t is not None and t.requires_grad]
    return list(torch.autograd.grad(3.0 * loss, leaves))


def assert_same(ours, theirs, tolerance: float = 5e-5) -> None:
    """Equal to `tolerance` of the largest entry; where all are below 1, of 1."""
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.isfinite(mine).all()
        if mine.numel():
            assert (mine - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
@pytest.mark.parametrize("positions", [0, 1, 7, 64])
@pytest.mark.parametrize("kind", ["full", "top"])
def test_fused_equals_eager(objective: Objective, positions: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    side = draft_side(positions, bias=True)
    full = full_target(positions)
    target = full if kind == "full" else top_target(full, 8)
    fused, sums = linear_objective(*side, objective, target)
    reference, terms = eager(*side, objective, target)
    torch.testing.assert_close(fused, reference)
    torch.testing.assert_close(sums, terms)
    assert_same(gradients(fused, *side[:2]), gradients(reference, *side[:2]))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_saturated_rows_stay_finite_and_equal(objective: Objective) -> None:
    side, target = draft_side(9, scale=40.0), full_target(9, scale=60.0)
    fused, _ = linear_objective(*side, objective, target)
    reference, _ = eager(*side, objective, target)
    torch.testing.assert_close(fused, reference)
    assert_same(gradients(fused, *side[:2]), gradients(reference, *side[:2]))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_tokens_of_probability_zero_give_finite_losses(objective: Objective) -> None:
    side = draft_side(6)
    certain = top_target(full_target(6), 4)
    certain = replace(certain, top_logprobs=certain.top_logprobs.log_softmax(-1), tail_mass=torch.zeros(6))
    fused, _ = linear_objective(*side, objective, certain)
    reference, _ = eager(*side, objective, certain)
    assert torch.isfinite(fused)
    torch.testing.assert_close(fused, reference)
    assert_same(gradients(fused, *side[:2]), gradients(reference, *side[:2]))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_mixed_precision_is_near_the_eager_form_in_mixed_precision(objective: Objective) -> None:
    side, target = draft_side(64), full_target(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, _ = linear_objective(*side, objective, target)
        reference, _ = eager(*side, objective, target)
    torch.testing.assert_close(fused, reference, rtol=1e-2, atol=1e-2)
    ours, theirs = gradients(fused, *side[:2]), gradients(reference, *side[:2])
    assert all(gradient.dtype == torch.float32 for gradient in ours)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_a_tied_weight_gets_the_sum_of_both_uses(objective: Objective) -> None:
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens, target = torch.arange(12), full_target(12)

    def loss(form):
        hidden = torch.nn.functional.embedding(tokens, weight).tanh()
        return form(hidden, Projection(weight), tokens + 1, objective, target)[0]

    (ours,), (theirs,) = torch.autograd.grad(loss(linear_objective), weight), torch.autograd.grad(loss(eager), weight)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("transform", [{"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
def test_scaled_and_capped_logits(transform: dict[str, float]) -> None:
    hidden, projection, labels = draft_side(11)
    projection, target = replace(projection, **transform), full_target(11)
    fused, _ = linear_objective(hidden, projection, labels, MIXTURE, target)
    reference, _ = eager(hidden, projection, labels, MIXTURE, target)
    torch.testing.assert_close(fused, reference)
    assert_same(gradients(fused, hidden, projection), gradients(reference, hidden, projection))


def test_a_frozen_projection_gets_no_gradient() -> None:
    hidden, projection, labels = draft_side(9, weight_grad=False)
    linear_objective(hidden, projection, labels, MIXTURE, full_target(9))[0].backward()
    assert projection.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_a_position_without_a_label_has_no_cross_entropy() -> None:
    logprobs = torch.randn(3, V).log_softmax(dim=-1)
    values = cross_entropy(logprobs, torch.tensor([4, IGNORED, 7]))
    assert values.tolist() == [-float(logprobs[0, 4]), 0.0, -float(logprobs[2, 7])]


def test_a_divergence_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="need the target's distributions"):
        linear_objective(*draft_side(3), Objective({"forward_kl": 1.0}))


P, Q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.3, 0.2]).log()


def test_t6_the_generalised_divergence_has_the_stated_convention() -> None:
    expected = {0.0: 0.085123, 1.0: 0.092033, 0.1: 0.007695, 0.5: 0.021901, 0.9: 0.008185}
    for beta, value in expected.items():
        assert float(jensen_shannon(P, Q, beta)) == pytest.approx(value, abs=1e-6)
    # divided by β it tends to the KL that stands for the end
    assert float(jensen_shannon(P, Q, 1e-3)) / 1e-3 == pytest.approx(float(forward_kl(P, Q)), rel=2e-2)
    assert float(jensen_shannon(P, Q, 1 - 1e-3)) / 1e-3 == pytest.approx(float(reverse_kl(P, Q)), rel=2e-2)


def test_values_by_hand() -> None:
    assert float(forward_kl(P, Q)) == pytest.approx(0.085123, abs=1e-6)
    assert float(reverse_kl(P, Q)) == pytest.approx(0.092033, abs=1e-6)
    assert float(total_variation(P, Q)) == pytest.approx(0.2, abs=1e-6)  # ½ (0.2 + 0.1 + 0.1)
    assert float(negative_log_acceptance(P, Q)) == pytest.approx(-torch.tensor(0.8).log().item(), abs=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_zero_for_equal_distributions_and_positive_else(name: str) -> None:
    objective = Objective({name: 1.0})
    logprobs = torch.randn(4, V, generator=torch.Generator().manual_seed(3)).log_softmax(dim=-1)
    labels = torch.zeros(4, dtype=torch.long)
    assert objective.terms(logprobs, labels, logprobs, logprobs).abs().max() < 1e-5
    assert objective.terms(logprobs, labels, logprobs.roll(1, 0), logprobs).min() > 1e-2


@pytest.mark.parametrize("name", DIVERGENCES)
def test_t7_a_value_does_not_depend_on_how_far_the_vocabulary_is_padded(name: str) -> None:
    padded_p, padded_q = (torch.cat([t, torch.full((97,), -1e4)]) for t in (P, Q))
    wide = Objective({name: 1.0}).terms(
        padded_q[None], torch.zeros(1, dtype=torch.long), padded_p[None], padded_q[None]
    )
    narrow = Objective({name: 1.0}).terms(Q[None], torch.zeros(1, dtype=torch.long), P[None], Q[None])
    torch.testing.assert_close(wide, narrow)


def values_of_best_tokens(name: str, temperature: float) -> tuple[list[float], float]:
    """The loss from 2, 8, 32 and all but one of the target's best tokens, and from its whole distribution."""
    full, draft = full_target(32), torch.randn(32, V, generator=torch.Generator().manual_seed(5))
    objective, labels = Objective({name: 1.0}, temperature), torch.zeros(32, dtype=torch.long)

    def value(target) -> float:
        return float(position_losses(objective, draft, labels, target, slice(None)).sum())

    return [value(top_target(full, best)) for best in (2, 8, 32, V - 1)], value(full)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name not in OVERLAPS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_best_tokens_and_tail_bound_the_divergence_from_below_and_reach_it(name: str, temperature: float) -> None:
    coarse, whole = values_of_best_tokens(name, temperature)
    assert coarse == sorted(coarse)
    assert coarse[-1] == pytest.approx(whole, rel=1e-2)
    if temperature == 1.0:
        assert coarse[-1] == pytest.approx(whole, rel=1e-5)  # the tail is one token: nothing is lost
        assert all(c <= whole * (1 + 1e-5) for c in coarse)


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_overlap_from_best_tokens_is_never_above_the_real_one(name: str, temperature: float) -> None:
    coarse, whole = values_of_best_tokens(name, temperature)
    assert coarse == sorted(coarse, reverse=True)
    assert coarse[-1] >= whole * (1 - 1e-5)
    assert coarse[-1] == pytest.approx(whole, rel=1e-2)


@pytest.mark.parametrize("name", OVERLAPS)
def test_no_credit_for_mass_on_tokens_that_the_target_has_not_stored(name: str) -> None:
    """A draft that says wrong rare tokens alone learns nothing good of itself, whatever the target's tail holds."""
    full = full_target(4)
    top = replace(top_target(full, 2), tail_mass=torch.full((4,), 0.5))
    draft = torch.zeros(4, V).scatter(-1, top.ids, -60.0)
    loss = position_losses(Objective({name: 1.0}), draft, torch.zeros(4, dtype=torch.long), top, slice(None))
    assert (loss > (0.999 if name == "total_variation" else 50.0)).all()


def test_the_tail_at_a_lower_temperature_is_an_upper_bound() -> None:
    full = full_target(32)
    top = top_target(full, 8)
    for temperature in (0.5, 0.7):
        exact = full.logprobs(slice(None), temperature).exp()
        tail = 1.0 - exact.gather(-1, top.ids).sum(dim=-1)
        assert (top.logprobs(slice(None), temperature)[:, -1].exp() >= tail - 1e-6).all()


def test_a_reduced_vocabulary_keeps_the_targets_own_probabilities() -> None:
    full = full_target(12)
    kept = torch.arange(0, V, 2)
    reduced = replace(full, vocabulary=kept)
    torch.testing.assert_close(reduced.logprobs(slice(None), 0.7), full.logprobs(slice(None), 0.7)[:, kept])
    logits = torch.randn(12, len(kept), generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(12, dtype=torch.long)
    overlap = position_losses(Objective({"total_variation": 1.0}, 0.7), logits, labels, reduced, slice(None))
    draft = torch.zeros(12, V)
    draft[:, kept] = (logits / 0.7).softmax(dim=-1)
    expected = 1.0 - torch.minimum(full.logprobs(slice(None), 0.7).exp(), draft).sum(dim=-1)
    torch.testing.assert_close(overlap[0], expected)


def test_best_tokens_that_the_draft_cannot_propose_are_lost_mass() -> None:
    full, kept = full_target(12), torch.arange(0, V, 2)
    places = torch.full((V,), len(kept))
    places[kept] = torch.arange(len(kept))
    top = top_target(full, V - 1)
    top = replace(top, ids=places[top.ids])
    objective, labels = Objective({"total_variation": 1.0}, 1.0), torch.zeros(12, dtype=torch.long)
    logits = torch.randn(12, len(kept), generator=torch.Generator().manual_seed(1))
    exact = position_losses(objective, logits, labels, replace(full, vocabulary=kept), slice(None))
    torch.testing.assert_close(position_losses(objective, logits, labels, top, slice(None)), exact, atol=2e-2, rtol=0)


def heads_side(heads: int, positions: int, *, own: bool, rank: int):
    generator = torch.Generator().manual_seed(7)
    frozen = torch.randn(V, D, generator=generator)
    hidden = [torch.randn(positions, D + rank, generator=generator).requires_grad_() for _ in range(heads)]
    weights = [torch.randn(V, D, generator=generator).requires_grad_() if own else frozen for _ in range(heads)]
    updates = [torch.randn(V, rank, generator=generator).requires_grad_() if rank else None for _ in range(heads)]
    projections = [Projection(weight, update=update) for weight, update in zip(weights, updates, strict=True)]
    labels = torch.randint(0, V, (heads, positions), generator=generator)
    counted = torch.rand(heads, positions, generator=generator) < 0.8
    return hidden, projections, labels.masked_fill(~counted, IGNORED), counted


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
@pytest.mark.parametrize(("own", "rank"), [(False, 0), (True, 0), (False, 3)], ids=["shared", "own", "low_rank"])
@pytest.mark.parametrize("kind", ["full", "top"])
def test_heads_together_equal_each_alone_eagerly(
    objective: Objective, own: bool, rank: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    hidden, projections, labels, counted = heads_side(3, 12, own=own, rank=rank)
    target = full_target(12) if kind == "full" else top_target(full_target(12), 8)
    decay, factors = [1.0, 0.5, 0.25], torch.tensor(list(objective.weights.values()))
    fused, sums = heads_objective(hidden, projections, labels, objective, target, counted=counted, head_weights=decay)
    terms = torch.stack(
        [
            (position_losses(objective, projection.of(states), labels[i], target, slice(None)) * counted[i]).sum(-1)
            for i, (states, projection) in enumerate(zip(hidden, projections, strict=True))
        ]
    )
    reference = (torch.tensor(decay) * (terms @ factors)).sum()
    torch.testing.assert_close(fused, reference)
    torch.testing.assert_close(sums, terms.detach())
    parameters = [t for p in projections for t in (p.weight, p.update) if t is not None and t.requires_grad]
    assert len(parameters) == 3 * (own + bool(rank))
    assert_same(*(torch.autograd.grad(loss, [*hidden, *parameters]) for loss in (fused, reference)))


def test_the_targets_distribution_is_computed_once_for_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    hidden, projections, labels, _ = heads_side(3, 12, own=False, rank=0)
    seen, target = [], full_target(12)
    monkeypatch.setattr(
        FullTarget, "part", lambda self, chunk, part=FullTarget.part: seen.append(chunk) or part(self, chunk)
    )
    heads_objective(hidden, projections, labels, MIXTURE, target)
    assert seen == [slice(0, 5), slice(5, 10), slice(10, 12)]
