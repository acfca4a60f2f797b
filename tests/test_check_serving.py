"""What scripts/check_serving.py passes and fails, without vLLM: engines' answers are made by hand."""

from pathlib import Path

import pytest
import torch
from heads_factory import export_heads
from registry_factory import registry, root  # noqa: F401
from safetensors.torch import load_file

from scripts import check_serving
from scripts.check_serving import AFTER, BACK, BEFORE, CACHE, STAGES, Served
from specdist.drafters.heads_file import HEADS_FILE
from specdist.registry.store import Registry
from specdist.target import open_target

# ruff: noqa: F811  (fixtures are arguments of the names that are imported)

ROWS = [{"prompt_id": "p0"}, {"prompt_id": "p1"}]
FIRST, OTHER = [[3, 4], [2, 5]], [[5, 1], [6, 0]]


def answers(counters: list[list[int]], tokens: list[int], gap: float = 1.0) -> list[dict]:
    best = [{"11": -0.5, "12": -0.5, "99": -0.5 - gap} for _ in tokens]
    return [
        {"token_ids": tokens, "best": best, "seconds": 0.5, "num_drafts": d, "accepted_at_position": [a]}
        for d, a in counters
    ]


def walk(**changed: Served) -> dict[str, Served]:
    """Stages of a good walk, but for those that are given."""
    plain = answers(FIRST, [11, 12])
    good = {
        stage: check_serving.serve(stage, ROWS, plain, answers(OTHER if stage == AFTER else FIRST, [11, 12]))
        for stage in STAGES
    }
    return {**good, **{served.stage: served for served in changed.values()}}


def served(stage: str, counters: list[list[int]], tokens: list[int] | None = None, gap: float = 1.0) -> Served:
    return check_serving.serve(stage, ROWS, answers(FIRST, [11, 12], gap), answers(counters, tokens or [11, 12]))


def test_a_walk_that_opens_the_right_version_each_time_passes() -> None:
    stages = walk()
    assert check_serving.problems(stages) == []
    assert stages[BEFORE].num_accepted == 9
    assert stages[BEFORE].tokens_per_second == 4.0, "2 tokens in half a second; the first answer warms up"
    assert "4.0 tokens/s" in check_serving.line("draft", stages[BEFORE], 2)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (served(AFTER, FIRST), "after a promotion: vLLM drafts as before"),
        (served(BACK, OTHER), "after a rollback: vLLM does not draft as the champion did"),
        (served(CACHE, OTHER), "through the cache: vLLM does not draft as the champion did"),
        (served(BACK, FIRST, [11, 99]), "after a rollback: 2 answers leave the target's own tokens"),
        (served(BEFORE, [[3, 0], [2, 0]]), "champion: no drafted token was accepted"),
    ],
)
def test_another_version_other_tokens_and_no_acceptance_fail(wrong: Served, problem: str) -> None:
    assert any(found.startswith(problem) for found in check_serving.problems(walk(wrong=wrong)))


def test_a_near_tie_is_no_other_text() -> None:
    near = served(BACK, FIRST, [11, 99], gap=0.01)
    assert (near.num_identical, near.different) == (0, [])


def test_the_other_version_is_another_drafter_of_the_same_form(
    registry: Registry, tiny_target_dir: Path, tmp_path: Path
) -> None:
    export_heads(open_target(str(tiny_target_dir)), tmp_path / "heads")
    registry.publish(tmp_path / "heads", files={}, tags={}, expected_champion=None)
    assert check_serving.publish_other(registry, tmp_path / "other") == "2"
    first, other = (load_file(registry.get(number).path / HEADS_FILE) for number in "12")
    assert {key: t.shape for key, t in first.items()} == {key: t.shape for key, t in other.items()}
    assert not torch.equal(first["0.0.linear.bias"], other["0.0.linear.bias"])
    assert registry.rollback().number == "1"
