"""What a report says about heads: accuracies of known ranks, costs, what to serve, and how it is shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_factory import make_report
from test_heads import TARGET, VOCAB, make_heads
from test_report import Tags
from test_tree_search import row
from transformers import AutoModelForCausalLM, MistralConfig
from warm_process import run_ranks

from specdist.consistency import count_faults, non_finite_numbers
from specdist.decoding.loop import decode
from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.errors import ConfigError
from specdist.evaluation import verify_cost
from specdist.evaluation.acceptance import EvalSet, HeadsScorer, TreeScorer, replay_counts, target_pass
from specdist.evaluation.heads_report import fastest, head_accuracies, heads_report, predict_speeds, rank_texts
from specdist.evaluation.page import render_page
from specdist.evaluation.page_heads import PUBLISHED, recommendations
from specdist.evaluation.tree_search import RankedTexts
from specdist.evaluation.verify_cost import (
    CONTEXT_TOKENS,
    CachedContext,
    draft,
    measure_costs,
    passages,
    verify_cost_ratio,
)
from specdist.metrics import pooled_length
from specdist.schema import DistillRow, EvalReport, SamplingSpec
from specdist.schema_heads import TOP, DraftShape, HeadsReport, VerifyCost
from specdist.target import forward_block
from specdist.tree import MAX_RANK, DraftTree

SAMPLING = SamplingSpec(max_new_tokens=24)
SIZES = (1, 4, 8)
IDS = [(7 * i) % VOCAB for i in range(90)]


def scorer(kind: str = "medusa") -> HeadsScorer:
    return HeadsScorer(HeadsOnTarget(make_heads(kind, scale=0.05), TargetEnds.of(TARGET)))


def greedy_set(num_prompts: int = 8) -> EvalSet:
    """Answers of the tiny target, two to the first prompt."""
    texts = []
    for i in range(num_prompts + 1):
        prompt = [i + 1, i + 2, 2 * i + 1]
        ids = decode(TARGET, prompt, SAMPLING, [0]).completion_ids
        name = f"p{max(0, i - 1)}"
        texts.append(
            target_pass(TARGET, DistillRow(f"r{i}", name, i, 0, "d", prompt, ids, "length", SAMPLING, 0), SAMPLING)
        )
    return EvalSet(SAMPLING, texts)


@pytest.fixture(scope="module")
def eval_set() -> EvalSet:
    return greedy_set()


@pytest.fixture(scope="module")
def measured(eval_set: EvalSet) -> HeadsReport:
    return heads_report(scorer(), eval_set, TARGET, batch_sizes=(2, 1), tree_sizes=SIZES)


# --- Accuracy


def test_accuracy_of_known_ranks() -> None:
    first = torch.tensor([[10, 10], [0, 0], [1, 4], [7, 9], [10, 10]])
    second = torch.tensor([[10, 10], [0, 10]])  # head 1 has no token to predict here
    texts = RankedTexts([row("a", 5), row("b", 2)], [first, second])
    head, other = head_accuracies(texts)
    assert TOP == (1, 2, 5, 10)
    assert (head.head, head.num_tokens, head.accuracy) == (0, 5, [2 / 5, 3 / 5, 3 / 5, 4 / 5])
    assert (other.head, other.num_tokens, other.accuracy) == (1, 3, [1 / 3, 1 / 3, 2 / 3, 1.0])
    assert head.intervals[0] == [0.25, 1.0]  # of prompt a alone 1 of 4, of b alone 1 of 1
    assert other.intervals[0] == pytest.approx([1 / 3, 1 / 3])


def test_a_head_that_no_text_is_long_enough_for_is_not_known() -> None:
    texts = RankedTexts([row("a", 2)], [torch.tensor([[10, 10], [0, 10]])])
    assert head_accuracies(texts)[1].num_tokens == 0
    assert head_accuracies(texts)[1].intervals == [[0.0, 1.0]] * 4


def test_accuracy_is_the_heads_share_of_right_candidates(eval_set: EvalSet, measured: HeadsReport) -> None:
    own = scorer()
    assert len(measured.accuracies) == own.heads.heads.num_heads
    for head, accuracy in enumerate(measured.accuracies):
        right = places = 0
        for text in eval_set.texts:
            ids = text.row.completion_ids
            for start in range(1, len(ids) - head):
                path = torch.tensor([ids[start - 1 : start + head]])
                logits = own.heads.logits(head, text.hidden[start - 1][None], path)
                right += int(ids[start + head] in logits[0].topk(5).indices.tolist())
                places += 1
        assert (accuracy.num_tokens, accuracy.accuracy[2]) == (places, pytest.approx(right / places))


def test_a_target_that_verifies_no_trees_gets_chains_alone(eval_set: EvalSet, caplog: pytest.LogCaptureFixture) -> None:
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=TARGET.config.hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    report = heads_report(scorer(), eval_set, model, batch_sizes=(1,), tree_sizes=SIZES)
    assert {shape.kind for shape in report.shapes} == {"chain"}
    assert report.draft_tree is None
    assert "sliding" in caplog.text.lower()


def test_the_tree_that_is_saved_is_the_fastest_one_at_the_smallest_batch_size(measured: HeadsReport) -> None:
    saved = measured.draft_tree
    assert saved is not None
    at_one = {s.num_nodes: s.predicted_speedup for s in measured.speeds if (s.kind, s.batch_size) == ("tree", 1)}
    assert at_one[saved.num_nodes] == max(at_one.values())


# --- Costs


def test_a_context_gives_the_state_of_its_newest_token_and_is_left_as_it_was() -> None:
    rows = passages(IDS, 2, 9)
    assert rows.shape == (2, CONTEXT_TOKENS + 9)
    assert rows.flatten()[90:].tolist() == IDS[: 2 * (CONTEXT_TOKENS + 9) - 90]
    context = CachedContext(TARGET, rows)
    for own, ids in zip(context.hidden, rows.tolist(), strict=True):
        torch.testing.assert_close(own, forward_block(TARGET, ids[:CONTEXT_TOKENS], None)[0][-1])
    keys = context.cache.layers[0].keys.clone()
    context.verify(9)
    assert torch.equal(context.cache.layers[0].keys, keys)


def test_hydra_is_asked_once_for_each_parent_and_medusa_for_all_levels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = DraftTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)], 3)
    for kind, expected in (("medusa", [3]), ("hydra", [2, 4, 2])):
        heads = scorer(kind).heads
        asked = []
        one, ahead = heads.logits, heads.logits_ahead
        monkeypatch.setattr(heads, "logits", lambda i, h, p, f=one, a=asked: a.append(len(h)) or f(i, h, p))
        monkeypatch.setattr(heads, "logits_ahead", lambda h, count, f=ahead, a=asked: a.append(count) or f(h, count))
        draft(heads, tree, torch.zeros(2, TARGET.config.hidden_size), torch.tensor([[1], [2]]))
        assert asked == expected


def test_costs_are_in_steps_and_grow_with_the_work() -> None:
    trees = [DraftTree.chain(1), DraftTree.of([(i,) for i in range(10)] + [(i, 0) for i in range(10)], 3)]
    cost, drafts = measure_costs(TARGET, scorer("hydra").heads, trees, IDS, batch_size=2, num_tokens=(1, 200))
    assert (cost.batch_size, cost.num_tokens, cost.ratios[0]) == (2, [1, 200], 1.0)
    assert cost.step_seconds > 0
    assert cost.ratios[1] > 1.5
    assert 0 < drafts[trees[0]] < drafts[trees[1]]


@pytest.mark.parametrize(("second", "warned"), [(0.04, True), (0.095, False), (0.2, False)])
def test_a_disturbed_timing_is_named(
    second: float, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        verify_cost, "interleaved", lambda run, works: dict(zip(works, (0.1, second, 0.01), strict=True))
    )
    cost, _ = measure_costs(TARGET, scorer().heads, [DraftTree.chain(1)], IDS, batch_size=2, num_tokens=(1, 5))
    assert cost.ratios == [1.0, second / 0.1]
    assert ("batch size 2" in caplog.text) == warned


def test_costs_lie_on_lines_between_the_measured_and_nowhere_else() -> None:
    cost = VerifyCost(1, 0.01, [1, 3, 5], [1.0, 1.2, 2.0])
    assert [verify_cost_ratio(cost, n) for n in range(1, 6)] == pytest.approx([1.0, 1.1, 1.2, 1.6, 2.0])
    with pytest.raises(ValueError, match="num_tokens 6: measured from 1 to 5"):
        verify_cost_ratio(cost, 6)


# --- Recommendation


def shape(kind: str, paths: list[list[int]], tau: float) -> DraftShape:
    return DraftShape(kind, paths, tau, [tau, tau], tau)


CHAINS = [shape("chain", [[0] * d for d in range(1, n + 1)], tau) for n, tau in ((1, 1.5), (2, 1.8), (3, 1.9))]
TREE = shape("tree", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]], 2.3)
DRAFTS = {DraftTree(tuple(map(tuple, s.paths))): 0.1 for s in (*CHAINS, TREE)}


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 1.05, 1.1, 1.1, 1.2], ("tree", 8)),  # arithmetic to spare
        ([1.0, 1.05, 1.1, 1.2, 2.0], ("chain", 2)),  # a wide block costs
        ([1.0, 1.1, 1.6, 2.2, 5.0], ("chain", 1)),  # each token costs
    ],
)
def test_chain_or_tree_as_costs_say(ratios: list[float], expected: tuple[str, int]) -> None:
    speeds = predict_speeds([*CHAINS, TREE], VerifyCost(4, 0.01, [1, 2, 3, 4, 9], ratios), DRAFTS)
    best = fastest(speeds)
    assert (best.kind, best.num_nodes) == expected
    assert best.predicted_speedup == pytest.approx(
        {1: 1.5, 2: 1.8, 8: 2.3}[best.num_nodes] / (ratios[best.num_nodes if best.kind == "chain" else 4] + 0.1)
    )


def test_what_drafting_costs_decides_as_well() -> None:
    cost = VerifyCost(1, 0.01, [1, 9], [1.0, 1.2])
    dear = DRAFTS | {DraftTree(tuple(map(tuple, TREE.paths))): 0.9}
    assert fastest(predict_speeds([*CHAINS, TREE], cost, DRAFTS)).kind == "tree"
    assert fastest(predict_speeds([*CHAINS, TREE], cost, dear)).kind == "chain"


def test_where_nothing_pays_the_words_say_so(measured: HeadsReport) -> None:
    def with_speeds(value: float) -> str:
        scaled = replace(measured.recommended[0], predicted_speedup=value)
        return recommendations(replace(measured, recommended=[scaled]))[0]

    assert with_speeds(0.8).startswith("Serving one text at a time: the target alone.")
    assert "predicted to be 0.80 times as fast only" in with_speeds(0.8)
    assert "predicted to be 1.80 times as fast as the target alone" in with_speeds(1.8)


# --- The report


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_lengths_are_those_of_the_evaluation(eval_set: EvalSet, kind: str) -> None:
    own = scorer(kind)
    report = heads_report(own, eval_set, TARGET, batch_sizes=(1,), tree_sizes=SIZES)
    for length in (1, 2, 3):
        expected = pooled_length(replay_counts(own, eval_set, [length])["greedy", length])
        assert report.shape("chain", length).mean_accepted_length == pytest.approx(expected, abs=1e-12)
    assert [s.kind for s in report.shapes[:3]] == ["chain"] * 3
    trees = [s for s in report.shapes if s.kind == "tree"]
    assert 1 <= len(trees) <= len(SIZES)
    for found in trees:
        tree = DraftTree.of(found.paths, 3)
        counts = replay_counts(TreeScorer(own, tree), eval_set, [tree.depth])["greedy", tree.depth]
        assert found.replayed_mean_accepted_length == pytest.approx(pooled_length(counts), abs=1e-12)
        assert found.mean_accepted_length <= found.replayed_mean_accepted_length + 1e-12


def test_the_recommendation_is_the_best_prediction_at_each_batch_size(measured: HeadsReport) -> None:
    assert [speed.batch_size for speed in measured.recommended] == [1, 2]
    for best, cost in zip(measured.recommended, measured.verify_costs, strict=True):
        at_size = [speed for speed in measured.speeds if speed.batch_size == best.batch_size]
        assert len(at_size) == len(measured.shapes)
        assert best.predicted_speedup == max(speed.predicted_speedup for speed in at_size)
        tau = measured.shape(best.kind, best.num_nodes).mean_accepted_length
        verify = verify_cost_ratio(cost, best.num_nodes + 1)
        assert best.predicted_speedup == pytest.approx(tau / (verify + best.draft_cost_ratio))
    chains = {s.num_nodes: s.predicted_speedup for s in measured.speeds if (s.batch_size, s.kind) == (1, "chain")}
    assert measured.chain_length == max(chains, key=chains.get)


def test_what_cannot_be_reported_is_refused(eval_set: EvalSet) -> None:
    with pytest.raises(ConfigError, match="greedy texts"):
        heads_report(scorer(), EvalSet(SamplingSpec(temperature=0.8), eval_set.texts), TARGET)
    with pytest.raises(ConfigError, match=r"tree_sizes \[0\]"):
        heads_report(scorer(), eval_set, TARGET, tree_sizes=(0,))
    with pytest.raises(ConfigError, match="1 evaluation prompts"):
        heads_report(scorer(), EvalSet(SAMPLING, eval_set.texts[:2]), TARGET)


def test_it_is_part_of_a_report_and_reports_without_it_still_load(measured: HeadsReport) -> None:
    report = make_report(per_domain=2, heads=measured)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert EvalReport.from_json(plain) == report
    assert count_faults(report) == non_finite_numbers(report) == []
    del plain["heads"]
    assert EvalReport.from_json(plain) == replace(report, heads=None)


def test_edited_numbers_of_heads_are_found(measured: HeadsReport) -> None:
    def faults(**changes: object) -> list[str]:
        return count_faults(make_report(per_domain=2, heads=replace(measured, **changes)))

    first, *others = measured.shapes
    assert "beyond its levels" in faults(shapes=[replace(first, mean_accepted_length=2.5), *others])[0]
    best = replace(measured.recommended[0], predicted_speedup=9.0)
    assert "differs from its τ and costs" in faults(recommended=[best])[0]
    assert "chain_length 7" in faults(chain_length=7)[0]


# --- The page


def test_the_page_shows_the_heads(measured: HeadsReport) -> None:
    page = render_page(make_report(per_domain=2, heads=measured))
    tags = Tags(page)
    (alt,) = [value for tag, name, value in tags.attributes if name == "alt" and "chains and trees" in value]
    assert all(f"{s.kind} of {s.num_nodes} {s.mean_accepted_length:.2f}" in alt for s in measured.shapes)
    for accuracy in measured.accuracies:
        assert f"{100 * accuracy.accuracy[0]:.1f} %" in page
        assert f"{PUBLISHED[accuracy.head][1]:.1f} %" in page
    assert "FasterDecoding/Medusa, assets/medusa_acc.csv" in page
    for cost in measured.verify_costs:
        assert f"{cost.ratios[-1]:.2f}" in page
    for speed in measured.speeds:
        assert f"{speed.predicted_speedup:.2f}" in page
    assert "What to serve" in page
    assert f"num_speculative_tokens {measured.chain_length}" in page
    assert "Serving 2 texts at once" in page


def test_a_report_without_heads_has_no_such_section() -> None:
    assert "What to serve" not in render_page(make_report(per_domain=2))


def test_heads_beyond_the_published_have_a_dash(measured: HeadsReport) -> None:
    sixth = replace(measured.accuracies[0], head=5)
    page = render_page(make_report(per_domain=2, heads=replace(measured, accuracies=[sixth])))
    assert '<td class="t">head 5</td>' in page
    assert page.count('<td class="">-</td>') >= 2


# --- Processes


def test_two_processes_share_the_texts_and_get_the_same_ranks(tmp_path: Path, eval_set: EvalSet) -> None:
    done = run_ranks([str(Path(__file__).with_name("rank_in_processes.py")), str(tmp_path)], 2)
    assert not any(process.returncode for process in done), [process.stderr for process in done]
    expected = rank_texts(scorer(), eval_set)
    results = [torch.load(tmp_path / f"{i}.pt") for i in range(2)]
    assert [result["passes"] for result in results] == [4, 4]  # one of nine answers is too short to be drafted
    assert results[0]["report"] == results[1]["report"]
    for result in results:
        torch.testing.assert_close(result["ranks"], expected.padded)
    assert int(expected.padded.min()) < MAX_RANK
