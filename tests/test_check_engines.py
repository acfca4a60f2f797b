"""What scripts/check_engines.py passes and fails, without vLLM: engines' answers are made by hand."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts import check_engines
from specdist.errors import ArtifactError
from specdist.generation.engine import Answer, Request
from specdist.schema import SamplingSpec

TEXT = [11, 12, 13, 14]


def answer(ids: list[int], logprob: float = -0.5) -> dict[str, Any]:
    top = {"ids": [[i, 99] for i in ids], "logprobs": [[logprob, -3.0] for _ in ids]}
    return {"completion_ids": ids, "top": top}


def best(gap: float) -> Callable[[str], list[dict[str, float]]]:
    """Of the target: token 99 is the runner-up everywhere, by `gap`."""
    return lambda key: [{str(i): -0.5, "99": -0.5 - gap} for i in TEXT]


def judge(others: dict[str, Any], gap: float = 1.0) -> check_engines.Outcome:
    plain = {f"p{i}": answer(TEXT) for i in range(3)}
    return check_engines.compare(check_engines.Written("vllm 1", others, 2.0), plain, best(gap))


def test_the_same_tokens_pass() -> None:
    outcome = judge({f"p{i}": answer(TEXT, -0.501) for i in range(3)})
    assert outcome.problems == []
    assert outcome.num_identical == 3
    assert outcome.max_logprob_difference == pytest.approx(0.001)
    assert "3 of 3 rows" in check_engines.show(outcome)


@pytest.mark.parametrize(("gap", "is_near"), [(0.04, True), (0.06, False)])
def test_rows_that_part_are_listed_with_their_gap(gap: float, is_near: bool) -> None:
    # after they part, log-probabilities are of other texts
    parted = {
        **answer([*TEXT[:2], 99, 7]),
        "top": {"ids": [[11], [12], [13], [7]], "logprobs": [[-0.5]] * 2 + [[-9.0]] * 2},
    }
    outcome = judge({"p0": answer(TEXT), "p1": answer(TEXT), "p2": parted}, gap)
    found = outcome.near_ties if is_near else outcome.different
    assert [(d.prompt_id, d.position) for d in found] == [("p2", 2)]
    assert found[0].logit_gap == pytest.approx(gap)
    assert outcome.max_logprob_difference == 0.0
    assert bool(outcome.problems) is not is_near
    assert f"prompt p2, token 2, logit gap {gap:.5f}" in check_engines.show(outcome)


def test_a_missing_row_and_other_logprobs_fail() -> None:
    outcome = judge({"p0": answer(TEXT), "p1": answer(TEXT, -0.7)})
    assert outcome.problems == ["2 answers to 3 requests", "log-probabilities differ by up to 0.2"]


def test_a_row_that_arrives_twice_is_an_error() -> None:
    request = Request("p0", [1], SamplingSpec(), 0)

    class Twice:
        name, context_length = "twice", None

        def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
            yield from [Answer(request, TEXT, "length")] * 2

    with pytest.raises(ArtifactError, match="p0 arrived twice"):
        check_engines.collect(Twice(), [request])
