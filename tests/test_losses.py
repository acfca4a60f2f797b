"""The fused loss against the eager one: values and gradients, tight in fp32, tolerant in bf16, saturated rows too."""

import pytest
import torch

from specdist import losses
from specdist.losses import linear_cross_entropy


def inputs(positions: int, *, scale: float = 1.0, weight_grad: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(positions)
    hidden = (scale * torch.randn(positions, 16, generator=generator)).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).requires_grad_(weight_grad)
    return hidden, weight, torch.randint(0, 50, (positions,), generator=generator)


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


@pytest.mark.parametrize("positions", [0, 1, 7, 64])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_fused_equals_eager_in_fp32(positions: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 5)  # chunks that do not divide the positions
    ours, theirs = inputs(positions, scale=scale), inputs(positions, scale=scale)
    fused, reference = 3.0 * linear_cross_entropy(*ours), 3.0 * eager(*theirs)
    torch.testing.assert_close(fused, reference)
    fused.backward()
    reference.backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-3, rtol=1e-4)


def test_fused_equals_eager_under_bf16_autocast() -> None:
    ours, theirs = inputs(64), inputs(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, reference = linear_cross_entropy(*ours), eager(*theirs)
    torch.testing.assert_close(fused, reference, rtol=1e-2, atol=1e-2)
    fused.backward()
    reference.backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=5e-2, atol=0.15)


def test_a_frozen_projection_gets_no_gradient() -> None:
    hidden, weight, labels = inputs(9, weight_grad=False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0
