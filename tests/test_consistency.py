"""No number of a report can be lost, poisoned or edited on the way to promote: each leaf is tried, one at a time."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from report_factory import make_report

from specdist.consistency import count_faults, non_finite_numbers
from specdist.errors import ArtifactError, SpecdistError
from specdist.gate import GatePolicy, decide
from specdist.metrics import acceptance_result
from specdist.schema import EvalReport

# The verdict does not depend on these: they are shown. A number that is not finite rejects even there.
NOT_JUDGED = (
    ("target", "eos_token_ids"),
    ("checkpoints",),
    ("speed", "points"),
    ("certifications", 0, "replay_interval"),
)


def numeric_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numeric_leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from numeric_leaves(item, (*path, i))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def with_leaf(data: dict[str, Any], path: tuple[Any, ...], change: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    if change is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = change
    return changed


def verdict_of(data: dict[str, Any], champion: EvalReport | None, policy: GatePolicy) -> str:
    """The verdict, or "error" where the report cannot be read; any other exception fails the test."""
    try:
        report = EvalReport.from_json(data, "report.json")
        version = None if champion is None else "1"
        return decide(report, champion, policy, report_sha256="f", champion_version=version).verdict
    except SpecdistError:
        return "error"


@pytest.fixture(scope="module")
def small() -> EvalReport:
    domains = {"code": 0.6, "writing": 0.5}
    report = make_report(gammas=(2,), settings=("greedy",), per_domain=5, domains=domains)
    return replace(report, checkpoints=report.checkpoints[:2])


def test_no_lost_or_poisoned_number_promotes(small: EvalReport) -> None:
    policy = GatePolicy(min_prompts=5, min_domain_prompts=5)
    data = small.to_json()
    assert verdict_of(data, None, policy) == "promote"
    paths = list(numeric_leaves(data))
    assert len(paths) > 100
    for path in paths:
        for poison in (math.nan, math.inf, -math.inf, "", [], {}):
            assert verdict_of(with_leaf(data, path, poison), None, policy) != "promote", (path, poison)
        if not any(path[: len(prefix)] == prefix for prefix in NOT_JUDGED):
            assert verdict_of(with_leaf(data, path, None), None, policy) != "promote", path


def test_no_count_can_be_set_to_another_value(small: EvalReport) -> None:
    policy = GatePolicy(min_prompts=5, min_domain_prompts=5)
    data = small.to_json()
    counted = [path for path in numeric_leaves(data) if path[0] in ("acceptance", "untrained")]
    assert len(counted) > 100
    for path in counted:
        if "mean_accepted_length_interval" not in path:  # intervals are computed anew
            for value in (-1.0, 1e9, 1e308):
                assert verdict_of(with_leaf(data, path, value), None, policy) != "promote", (path, value)


def test_no_poisoned_champion_is_replaced(small: EvalReport) -> None:
    policy = GatePolicy(min_prompts=5, min_domain_prompts=5)
    domains = {"code": 0.6, "writing": 0.5}
    better = make_report(1.3, gammas=(2,), settings=("greedy",), per_domain=5, domains=domains).to_json()
    assert verdict_of(better, small, policy) == "promote"
    data = small.to_json()
    for path in numeric_leaves(data):
        try:
            champion = EvalReport.from_json(with_leaf(data, path, math.nan))
        except ArtifactError:
            continue
        assert verdict_of(better, champion, policy) != "promote", path


def test_faults_are_named(small: EvalReport) -> None:
    assert count_faults(small) == []
    assert non_finite_numbers(small) == []
    assert small.primary is not None
    twice = replace(small.primary, prompts=[*small.primary.prompts, small.primary.prompts[0]])
    assert "greedy γ=2: a prompt is counted twice" in count_faults(replace(small, acceptance=[twice]))
    renamed = replace(small.primary, domains={"code": small.primary.domains["code"]})
    assert "summaries of the domains ['code']" in count_faults(replace(small, acceptance=[renamed]))[0]
    grown = [replace(small.primary.prompts[0], accepted_at_position=[1.0, 2.0]), *small.primary.prompts[1:]]
    settings = {"setting": "greedy", "temperature": 0.0, "draft_sample_method": "greedy", "num_speculative_tokens": 2}
    (fault,) = count_faults(replace(small, acceptance=[acceptance_result(grown, **settings, draws=50)]))
    assert "grow with the position" in fault
    empty = replace(small.primary, prompts=[])
    assert "greedy γ=2: no prompts" in count_faults(replace(small, acceptance=[empty]))
