"""What decoding costs: measured on tiny models, turned into predictions, and shown in a report."""

from dataclasses import replace

import pytest
import torch
from report_factory import make_report, make_speed
from test_heads import TARGET, VOCAB, make_heads
from test_report import Tags
from test_tree_search import row

from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.evaluation import step_costs
from specdist.evaluation.page import render_page
from specdist.evaluation.pictures import draw_costs
from specdist.evaluation.step_costs import measure_step_costs, predict_speed
from specdist.evaluation.summary import mispredicted
from specdist.schema import EvalReport
from specdist.schema_costs import DraftCost, FirstToken, Memory, StepCosts
from specdist.schema_heads import VerifyCost
from specdist.target import new_cache
from specdist.tree import DraftTree

CURVE = VerifyCost(1, 0.04, [1, 2, 3, 5, 9, 17, 33, 65], [1.0, 1.05, 1.1, 1.2, 1.3, 1.6, 2.4, 4.0])
COSTS = StepCosts(
    "AMD EPYC 7R13, 2 cores",
    2,
    "bfloat16",
    64,
    [CURVE, replace(CURVE, batch_size=4, ratios=[1.0, 1.2, 1.4, 1.8, 2.6, 4.2, 7.4, 13.8])],
    [DraftCost("chain", 1, 0.25), DraftCost("chain", 4, 1.0), DraftCost("tree", 16, 0.1)],
    FirstToken(120, 0.151, 0.152, 0.04),
    Memory(269_000_000, 85_000_000, 23_040, 3_072, 900_000_000, 905_000_000),
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "_SECONDS", 0.0)  # no more than the least rounds


def measured(drafter: DraftModelDrafter | HeadsDrafter, **more: object) -> StepCosts:
    rows = [row(f"p{i}", 20) for i in range(3)]
    return measure_step_costs(TARGET, drafter, rows, **{"lengths": (1, 4), "batch_sizes": (1, 2), **more})


def test_costs_of_a_draft_model_are_measured() -> None:
    costs = measured(DraftModelDrafter(TARGET, VOCAB))
    assert [curve.batch_size for curve in costs.verify] == [1, 2]
    assert all(curve.num_tokens == CURVE.num_tokens and curve.ratios[0] == 1.0 for curve in costs.verify)
    one, four = costs.draft_ratio("chain", 1), costs.draft_ratio("chain", 4)
    assert one is not None
    assert four is not None
    assert 2 * one < four
    assert costs.draft_ratio("chain", 3) is None
    assert costs.first_token.first_block_seconds > 0
    cache = new_cache(TARGET)
    TARGET(input_ids=torch.tensor([[1]]), cache=cache, use_cache=True)
    per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert costs.memory.target_cache_per_token == costs.memory.drafter_cache_per_token == per_token
    assert costs.memory.target_weights == sum(p.nbytes for p in TARGET.parameters())
    assert costs.memory.drafter_weights == 0  # its weights are the target's own
    assert StepCosts.from_json(costs.to_json()) == costs


def test_curves_that_are_known_are_not_measured_again_and_heads_draft_no_more_than_they_can() -> None:
    heads = make_heads("medusa", scale=0.05)
    on_target, tree = HeadsOnTarget(heads, TargetEnds.of(TARGET)), DraftTree.of([(0,), (1,), (0, 0)], heads.num_heads)
    costs = measured(
        HeadsDrafter(on_target), trees=[HeadsDrafter(on_target, tree)], lengths=(1, 99), verify=COSTS.verify
    )
    assert costs.verify == COSTS.verify
    assert [(c.kind, c.num_tokens) for c in costs.draft] == [("chain", 1), ("chain", heads.num_heads), ("tree", 3)]
    assert costs.memory.drafter_weights == sum(p.nbytes for p in heads.parameters())
    assert costs.memory.drafter_cache_per_token == 0


def test_e16_predictions_follow_from_tau_and_the_curves() -> None:
    speed = make_speed({1: 1.3, 3: 1.6, 4: 1.8})
    tree = replace(speed.points[0], num_speculative_tokens=2, num_tree_nodes=16, mean_accepted_length=1.9)
    points = predict_speed(replace(speed, points=[*speed.points, tree]), COSTS).points
    expected = [1.3 / (0.25 + 1.05), speed.points[1].predicted_speedup, 1.8 / (1.0 + 1.2), 1.9 / (0.1 + 1.6)]
    assert [point.predicted_speedup for point in points] == pytest.approx(expected)


@pytest.mark.parametrize(("measured_share", "said"), [(1.14, False), (1.16, True), (0.86, False), (0.84, True)])
def test_e16_a_prediction_that_is_off_by_more_than_15_percent_is_said_in_words(
    measured_share: float, said: bool
) -> None:
    speed = make_speed({4: 1.8})
    point = replace(speed.points[0], predicted_speedup=1.25, speedup=1.25 * measured_share)
    words = f"At γ=4 the costs predict 1.25 times the target alone, but {1.25 * measured_share:.2f} times was measured"
    assert any(words in sentence for sentence in mispredicted(replace(speed, points=[point]))) == said


def test_the_page_shows_costs_and_reports_without_them_still_load() -> None:
    report = make_report(0.9, per_domain=1)
    report = replace(
        report, speed=replace(speed := make_speed({4: 1.8}), points=[replace(speed.points[0], speedup=9.0)])
    )
    with_costs = replace(report, costs=COSTS)
    assert EvalReport.from_json(with_costs.to_json()) == with_costs
    old = report.to_json()
    del old["costs"]
    assert EvalReport.from_json(old) == report
    page = render_page(with_costs)
    Tags(page)
    for words in (
        "What a step costs",
        "1.00 for 4 (0.25 a token)",
        "0.10 for a tree of 16 nodes",
        "after 0.151 s without and 0.152 s with the drafter",
        "269.0 MB for the target and 85.0 MB more",
        "23.0 MB and 3.1 MB more",
        "900.0 MB",
        "but 9.00 times was measured",
    ):
        assert words in page, words
    assert "What a step costs" not in render_page(report)
    assert "batch size 4 1.00, 1.20" in draw_costs(COSTS).description
    unknown = replace(COSTS, memory=replace(COSTS.memory, peak=None, drafting_peak=None))
    assert "At its peak" not in render_page(replace(report, costs=unknown))
