"""The gate on reports whose truth is known: how often it errs, what it finds, and that all at once is as one by one."""

import pytest

from scripts import simulate_gate


@pytest.mark.parametrize(("pairs", "prompts", "domains"), [
    (60, 120, 3),
    pytest.param(2_000, 480, 12, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_gate_errs_as_rarely_as_it_says(pairs: int, prompts: int, domains: int) -> None:
    found = simulate_gate.run(pairs, prompts, domains, checked=1)
    assert len(found) == 3
    assert [text for text, held in found if not held] == []
