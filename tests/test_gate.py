"""Verdicts of the gate: what promotes, what holds and what rejects."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from report_factory import DOMAINS, divergence
from report_factory import make_report as make_full_report
from report_factory import make_result as make_full_result

from specdist.gate import GatePolicy, decide, exit_code, format_decision
from specdist.metrics import acceptance_result, perplexity_ratio
from specdist.schema import (
    Certification,
    EvalReport,
    Fidelity,
    GateCheck,
    GateDecision,
    PromptCounts,
)
from specdist.schema_heads import DraftShape, HeadsReport
from specdist.schema_quality import AnswerLikelihood, TargetQuality

# 120 prompts: enough for the default policy, and half the work of the factory's 204
make_report = partial(make_full_report, gammas=(3,), per_domain=10)
make_result = partial(make_full_result, per_domain=10)


def judge(report: EvalReport, champion: EvalReport | None = None, **policy: Any) -> GateDecision:
    version = None if champion is None else "1"
    return decide(report, champion, GatePolicy(**policy), report_sha256="f" * 64, champion_version=version)


def check(decision: GateDecision, name: str) -> GateCheck:
    return next(c for c in decision.checks if c.name == name)


@pytest.fixture(scope="module")
def good() -> EvalReport:
    return make_report(gammas=(1, 3))


# --- A first drafter


def test_a_good_first_drafter_is_promoted(good: EvalReport) -> None:
    decision = judge(good)
    assert decision.verdict == "promote"
    assert exit_code(decision) == 0
    assert all(c.passed for c in decision.checks)
    assert decision.report_sha256 == "f" * 64
    assert decision.policy["required_certifications"] == ["greedy"]
    assert GateDecision.from_json(decision.to_json()) == decision


def test_same_input_same_decision(good: EvalReport) -> None:
    champion = make_report(0.95)
    assert judge(good, champion) == judge(good, champion)


def test_order_of_prompts_does_not_change_the_decision(good: EvalReport) -> None:
    turned = [replace(r, prompts=r.prompts[::-1]) for r in good.acceptance]
    champion = make_report(0.95)
    assert judge(replace(good, acceptance=turned), champion).checks == judge(good, champion).checks


def test_an_untrained_drafter_is_not_promoted() -> None:
    decision = judge(make_report(0.12), min_mean_accepted_length=1.0)
    assert decision.verdict == "hold"
    assert not check(decision, "gain_over_untrained").passed


def test_worse_than_untrained_is_rejected() -> None:
    decision = judge(make_report(0.5, untrained_strength=0.7))
    assert decision.verdict == "reject"
    assert exit_code(decision) == 4
    assert "gain_over_untrained" in decision.reason


@pytest.mark.parametrize(("floor", "verdict"), [(1.6, "promote"), (1.76, "hold"), (1.9, "reject")])
def test_floor_of_the_mean_accepted_length(good: EvalReport, floor: float, verdict: str) -> None:
    decision = judge(good, min_mean_accepted_length=floor)
    assert decision.verdict == verdict
    assert check(decision, "mean_accepted_length").threshold == floor


def test_few_prompts_hold() -> None:
    decision = judge(make_report(per_domain=4))
    assert decision.verdict == "hold"
    assert exit_code(decision) == 3
    assert "48 prompts" in decision.reason


def test_an_answer_without_drafts_counts_as_no_prompt(good: EvalReport) -> None:
    empty = [PromptCounts(f"short-{i}", "code", 0.0, 0.0, [0.0] * 3) for i in range(5)]
    settings = {"temperature": 0.0, "draft_sample_method": "greedy", "num_speculative_tokens": 3, "draws": 50}
    both = [
        acceptance_result([*r.prompts, *empty], setting="greedy", **settings)
        for r in (good.primary, good.untrained)
        if r is not None
    ]
    report = replace(good, acceptance=[both[0]], untrained=both[1], certifications=good.certifications[:1])
    assert check(judge(report), "prompts").observed == 120
    assert judge(report).verdict == "promote"


# --- Validity


def test_reasons_against_the_report_reject(good: EvalReport) -> None:
    decision = judge(replace(good, invalid_reasons=["the template differs"]))
    assert decision.verdict == "reject"
    assert "the template differs" in decision.reason


def test_g6_infinite_speed_is_rejected_and_not_stored(good: EvalReport) -> None:
    assert good.speed is not None
    points = [replace(p, speedup=math.inf) for p in good.speed.points]
    decision = judge(replace(good, speed=replace(good.speed, points=points)))
    assert decision.verdict == "reject"
    assert "speed.points[0].speedup" in decision.reason
    assert all(c.observed is None or math.isfinite(c.observed) for c in decision.checks)


def test_g9_nothing_accepted_is_rejected_with_a_hint(good: EvalReport) -> None:
    dead = make_result(0.0)
    decision = judge(replace(good, acceptance=[dead, *good.acceptance[1:]], certifications=good.certifications))
    failed = check(decision, "accepted_tokens")
    assert decision.verdict == "reject"
    assert not failed.passed
    assert all(word in failed.reason for word in ("names", "shapes", "vocabulary"))


def test_a_summary_that_was_edited_is_rejected(good: EvalReport) -> None:
    assert good.primary is not None
    edited = replace(good.primary, summary=replace(good.primary.summary, mean_accepted_length=2.9))
    decision = judge(replace(good, acceptance=[edited]))
    assert decision.verdict == "reject"
    assert "differs from the counts" in check(decision, "counts_consistent").reason


@pytest.mark.parametrize(
    "change",
    [
        {"accepted_at_position": [9.0, 30.0, 1.0]},
        {"accepted_at_position": [-1.0, -1.0, -1.0]},
        {"accepted_at_position": [5.0, 1.0]},
        {"num_draft_tokens": 0.0},
        {"num_draft_tokens": 1e6},
        {"prompt_id": "code-01"},
    ],
)
def test_impossible_counts_are_rejected(good: EvalReport, change: dict[str, Any]) -> None:
    assert good.primary is not None
    prompts = [replace(good.primary.prompts[0], **change), *good.primary.prompts[1:]]
    decision = judge(replace(good, acceptance=[replace(good.primary, prompts=prompts)]))
    assert decision.verdict == "reject"
    assert not check(decision, "counts_consistent").passed


def test_a_missing_primary_setting_is_rejected(good: EvalReport) -> None:
    assert "no acceptance" in judge(replace(good, num_speculative_tokens=7)).reason
    assert judge(replace(good, acceptance=[])).verdict == "reject"


def test_untrained_on_other_prompts_is_rejected(good: EvalReport) -> None:
    other = make_result(0.12, domains={"code": 0.5})
    assert "other prompts" in judge(replace(good, untrained=other)).reason
    assert "was measured at" in judge(replace(good, untrained=make_result(0.12, gamma=2))).reason


def broken(report: EvalReport, how: str) -> EvalReport:
    """`report` with one thing wrong that must never promote, nor stand as a champion to be beaten."""
    primary, speed = report.primary, report.speed
    assert primary is not None
    assert speed is not None
    first = primary.prompts[0]
    results = {
        "no prompts": replace(primary, prompts=[]),
        "no prompts, no domains": replace(primary, prompts=[], domains={}),
        "no drafts": replace(primary, prompts=[replace(p, num_drafts=0.0) for p in primary.prompts]),
        "NaN counts": replace(primary, prompts=[replace(first, num_drafts=math.nan), *primary.prompts[1:]]),
        "infinite counts": replace(primary, prompts=[replace(first, num_drafts=math.inf), *primary.prompts[1:]]),
        "text for counts": replace(primary, prompts=[replace(first, num_drafts="8"), *primary.prompts[1:]]),
        "no summary": replace(primary, summary=None),
        "text for a result": "2.4",
    }
    changes: dict[str, Any] = {
        "NaN speed": {"speed": replace(speed, target_tokens_per_second=math.nan)},
        "text for speed": {"speed": replace(speed, draft_cost_ratio="fast")},
        "no rows": {"num_training_rows": None},
        "no acceptance": {"acceptance": []},
        "text for acceptance": {"acceptance": "good"},
        "text for untrained": {"untrained": "bad"},
        "text for the target": {"target": "tiny"},
    }
    return replace(report, **(changes.get(how) or {"acceptance": [results[how]]}))


BROKEN = (
    "no prompts", "no prompts, no domains", "no drafts", "NaN counts", "infinite counts", "text for counts",
    "no summary", "text for a result", "NaN speed", "text for speed", "no rows", "no acceptance",
    "text for acceptance", "text for untrained", "text for the target",
)  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_g6_a_broken_report_never_promotes_and_is_given_a_reason(good: EvalReport, how: str) -> None:
    for champion in (None, good):
        decision = judge(broken(good, how), champion)
        assert decision.verdict == "reject"
        assert len(decision.reason) > 20
        assert GateDecision.from_json(decision.to_json()) == decision


@pytest.mark.parametrize("how", BROKEN)
def test_g6_a_broken_champion_is_not_beaten_and_a_reason_is_given(good: EvalReport, how: str) -> None:
    decision = judge(make_report(1.2), broken(good, how))
    assert decision.verdict == "hold"
    assert decision.reason.startswith("champion_report: not comparable: ")
    assert len(decision.reason) > 60


def test_g3_a_champion_whose_report_cannot_be_read_holds_and_says_why(good: EvalReport) -> None:
    fault = "versions/2/report.json: missing keys ['acceptance']"
    decision = decide(good, None, GatePolicy(), report_sha256="f", champion_version="2", champion_fault=fault)
    assert decision.verdict == "hold"
    assert fault in decision.reason


def test_what_is_wrong_with_the_exported_files_rejects(good: EvalReport) -> None:
    fault = "export/model.safetensors: 400 bytes, its header asks for 500"
    decision = decide(good, None, GatePolicy(), report_sha256="f", champion_version=None, export_faults=[fault])
    assert decision.verdict == "reject"
    assert decision.reason == f"export: {fault}"


# --- Certification and fidelity


def certification(**changes: Any) -> Certification:
    return replace(Certification("greedy", 3, 24, 1.76, 1.76, [1.7, 1.8], [], True), **changes)


@pytest.mark.parametrize(
    "certifications",
    [
        [],
        [certification(passed=False)],
        [certification(num_prompts=0)],
        [certification(decoder_mean_accepted_length=1.05)],
        [certification(mismatched_prompts=["code-00"])],
        [certification(), certification(setting="t0.8", passed=False)],
        [certification(), certification(setting="t0.8", decoder_mean_accepted_length=1.9)],
        [certification(), certification(setting="t0.8", replay_interval=[])],
        [certification(replay_interval=[])],
        [certification(setting="t0.8")],
    ],
)
def test_e15_replay_that_the_decoder_does_not_confirm_rejects(
    good: EvalReport, certifications: list[Certification]
) -> None:
    decision = judge(replace(good, certifications=certifications))
    assert decision.verdict == "reject"
    assert decision.reason.startswith("certification:")


def test_the_primary_setting_must_be_certified_whatever_the_policy(good: EvalReport) -> None:
    decision = judge(replace(good, certifications=[]), required_certifications=())
    assert decision.verdict == "reject"


@pytest.mark.parametrize(
    ("fidelity", "verdict"),
    [
        (None, "reject"),
        (Fidelity("float32", 0, 0, []), "reject"),
        (Fidelity("float32", 24, 23, [divergence(near_tie=False)]), "reject"),
        (Fidelity("float32", 24, 23, [divergence(near_tie=True)]), "reject"),
        (Fidelity("bfloat16", 24, 23, [divergence(near_tie=False)]), "reject"),
        (Fidelity("bfloat16", 24, 23, []), "reject"),
        (Fidelity("bfloat16", 24, 23, [divergence(near_tie=True)]), "promote"),
        (Fidelity("bfloat16", 24, 24, []), "promote"),
    ],
)
def test_e6_fidelity(good: EvalReport, fidelity: Fidelity | None, verdict: str) -> None:
    decision = judge(replace(good, fidelity=fidelity))
    assert decision.verdict == verdict
    if fidelity and verdict == "promote" and fidelity.divergences:
        assert "near-tie" in check(decision, "fidelity").reason


# --- A drafter that changes the target


def quality(increase: float, spread: float = 0.0, prompts: int = 120) -> TargetQuality:
    """Answers of 50 tokens, on which the changed target's perplexity is higher by `increase` on average."""
    losses = [50 * (math.log1p(increase) + spread * (-1) ** i) for i in range(prompts)]
    answers = [AnswerLikelihood(f"p{i}", "code", 50, -60.0, -60.0 - loss) for i, loss in enumerate(losses)]
    ratio = perplexity_ratio(answers)
    return TargetQuality("9" * 64, "float32", 0.8, answers, ratio, [ratio, ratio], 120, 90)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (quality(0.01), "promote"),
        (quality(-0.03), "promote"),
        (quality(0.05), "reject"),
        (quality(0.019, spread=0.05), "hold"),
        (quality(0.021, spread=0.05), "hold"),
        (quality(0.01, prompts=60), "hold"),
        (None, "hold"),
    ],
    ids=["slight", "none", "bad", "unclear", "unclear, worse", "few prompts", "not measured"],
)
def test_a_lossy_drafter_is_judged_by_its_targets_quality(
    good: EvalReport, measured: TargetQuality | None, verdict: str
) -> None:
    decision = judge(replace(good, lossless=False, quality=measured))
    assert decision.verdict == verdict
    assert check(decision, "task_quality").passed == (verdict == "promote")
    assert verdict == "promote" or "task_quality" in decision.reason
    assert all(len(line) <= 120 for line in format_decision(decision).splitlines())


def test_without_a_bound_for_quality_a_lossy_drafter_is_held(good: EvalReport) -> None:
    decision = judge(replace(good, lossless=False, quality=quality(0.0)), max_perplexity_increase=None)
    assert decision.verdict == "hold"
    assert "set max_perplexity_increase" in decision.reason


def test_a_lossy_drafter_must_decode_its_own_target_exactly(good: EvalReport) -> None:
    decision = judge(replace(good, lossless=False, quality=quality(0.0), fidelity=None))
    assert decision.verdict == "reject"
    assert not check(decision, "fidelity").passed


def test_a_lossless_drafter_needs_no_quality(good: EvalReport) -> None:
    assert "task_quality" not in {c.name for c in judge(good).checks}


@pytest.mark.parametrize(
    "change",
    [{"perplexity_ratio": 0.9}, {"answers": []}, {"num_identical": 121}, {"answers": quality(0.0).answers * 2}],
    ids=["edited", "empty", "too many", "twice"],
)
def test_quality_that_was_edited_is_rejected(good: EvalReport, change: dict[str, Any]) -> None:
    decision = judge(replace(good, lossless=False, quality=replace(quality(0.0), **change)))
    assert decision.verdict == "reject"
    assert "quality: " in check(decision, "counts_consistent").reason


# --- Against a champion


def test_better_than_the_champion_is_promoted(good: EvalReport) -> None:
    decision = judge(make_report(1.05), good)
    assert decision.verdict == "promote"
    assert "champion" in decision.reason
    assert check(decision, "gain_over_champion").champion == pytest.approx(good.primary.summary.mean_accepted_length)


def test_a_run_on_less_data_is_rejected_and_says_so(good: EvalReport) -> None:
    decision = judge(make_report(0.9, num_training_rows=1_200), good)
    assert decision.verdict == "reject"
    assert "1,200 rows" in decision.reason
    assert decision.champion_version == "1"


def test_the_same_drafter_again_is_held(good: EvalReport) -> None:
    assert judge(good, good).verdict == "hold"


def test_an_inconclusive_gain_is_held(good: EvalReport) -> None:
    """Better on every other prompt and worse on the rest: on average no difference that could be shown."""
    better, worse = make_result(1.1), make_result(0.9)
    mixed = [(b, w)[i % 2] for i, (b, w) in enumerate(zip(better.prompts, worse.prompts, strict=True))]
    settings = {"temperature": 0.0, "draft_sample_method": "greedy", "num_speculative_tokens": 3, "draws": 50}
    result = acceptance_result(mixed, setting="greedy", **settings)
    decision = judge(replace(good, acceptance=[result], certifications=good.certifications[:1]), good)
    gain = check(decision, "gain_over_champion")
    assert decision.verdict == "hold"
    assert not gain.passed
    assert gain.on_failure == "hold"


def test_a_hold_says_how_many_prompts_would_decide_it(good: EvalReport) -> None:
    """With that many prompts like those that were seen, the same difference is shown."""
    sides = make_result(0.99, seed=1), make_result(1.0)  # another seed is other luck on the same prompts

    def judged(copies: int) -> GateCheck:
        reports = []
        for side in sides:
            more = [replace(p, prompt_id=f"{p.prompt_id}.{i}") for i in range(copies) for p in side.prompts]
            settings = {"temperature": 0.0, "draft_sample_method": "greedy", "num_speculative_tokens": 3, "draws": 50}
            results = [acceptance_result(more, setting="greedy", **settings)]
            weak = [replace(p, accepted_at_position=[0.1 * x for x in p.accepted_at_position]) for p in more]
            untrained = acceptance_result(weak, setting="greedy", **settings)
            reports.append(replace(good, acceptance=results, untrained=untrained))
        return check(judge(*reports), "gain_over_champion")

    held = judged(1)
    assert (held.passed, held.on_failure) == (False, "hold")
    assert held.num_prompts_needed is not None
    assert 240 < held.num_prompts_needed < 600
    assert "prompts would decide it" in held.reason
    decided = judged(-(-held.num_prompts_needed // 120))
    assert decided.passed
    assert decided.num_prompts_needed is None


def test_no_number_of_prompts_decides_between_equal_drafters(good: EvalReport) -> None:
    gain = check(judge(good, good), "gain_over_champion")
    assert gain.num_prompts_needed is None
    assert "no number of prompts" in gain.reason
    assert gain.p_value == 1.0


def test_the_permutation_p_value_stands_beside_the_interval(good: EvalReport) -> None:
    better, worse = (check(judge(make_report(s), good), "gain_over_champion") for s in (1.05, 0.95))
    assert better.passed
    assert better.p_value == pytest.approx(1 / 10_001)
    assert "permutation p 0.0001" in better.reason
    assert worse.p_value is not None
    assert worse.p_value > 0.99


def test_a_domain_that_gets_much_worse_rejects(good: EvalReport) -> None:
    worse = {d: rate * (0.3 if d == "code" else 1.3) for d, rate in DOMAINS.items()}
    decision = judge(make_report(domains=worse), good)
    assert check(decision, "gain_over_champion").passed
    assert decision.verdict == "reject"
    assert decision.reason.startswith("domain:code")


def test_a_domain_with_few_prompts_never_holds() -> None:
    worse = {d: rate * (0.3 if d == "code" else 1.3) for d, rate in DOMAINS.items()}
    champion = make_report()
    decision = judge(make_report(domains=worse), champion, min_domain_prompts=11)
    assert decision.verdict == "reject", "shown to lose more than the margin, by ten prompts alone"
    slightly = {d: rate * (0.9 if d == "code" else 1.3) for d, rate in DOMAINS.items()}
    decision = judge(make_report(domains=slightly), champion, min_domain_prompts=11)
    assert decision.verdict == "promote"
    assert check(decision, "domain:code").reason.startswith("shown: 10 prompts")


def test_another_target_is_rejected(good: EvalReport) -> None:
    other = replace(good, target=replace(good.target, weights_sha256="9" * 64))
    assert judge(make_report(1.2), other).verdict == "reject"


def test_the_same_target_under_another_name_is_compared(good: EvalReport) -> None:
    moved = replace(good, target=replace(good.target, model_id="a/directory"))
    assert judge(make_report(1.2), moved).verdict == "promote"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"acceptance": [make_result(0.9, gamma=2)]}, "not measured at greedy γ=3"),
        ({"acceptance": [replace(make_result(0.9), temperature=0.5)]}, "measured at"),
        ({"acceptance": [make_result(0.9, per_domain=9)]}, "other prompts"),
        ({"eval_prompts_sha256": "0" * 64}, "other prompts"),
        ({"acceptance": [replace(make_result(0.9), texts_sha256="9" * 64)]}, "other answers to the same prompts"),
        ({"num_training_rows": 1, "untrained": make_result(0.1, per_domain=2)}, "untrained"),
    ],
)
def test_a_champion_that_is_not_comparable_holds(good: EvalReport, change: dict[str, Any], word: str) -> None:
    decision = judge(make_report(1.2), replace(good, **change))
    assert decision.verdict == "hold"
    assert word in decision.reason


def test_a_champion_of_before_texts_were_recorded_is_compared_and_it_is_said(good: EvalReport) -> None:
    older = replace(good, acceptance=[replace(r, texts_sha256=None) for r in good.acceptance])
    better, same = judge(make_report(1.2), older), judge(make_report(1.2), good)
    assert (better.verdict, same.verdict) == ("promote", "promote")
    assert "does not say how its texts were written" in better.reason
    assert "does not say" not in same.reason


def test_g6_a_champion_that_is_not_finite_holds(good: EvalReport) -> None:
    assert good.speed is not None
    champion = replace(good, speed=replace(good.speed, target_tokens_per_second=math.nan))
    assert judge(make_report(1.2), champion).verdict == "hold"


def test_g3_an_alias_to_a_missing_version_does_not_promote(good: EvalReport) -> None:
    decision = decide(good, None, GatePolicy(), report_sha256="f", champion_version="2")
    assert decision.verdict == "hold"
    assert "champion points to version 2" in decision.reason


# --- Speed, both means, text


@pytest.mark.parametrize(
    ("asked", "verdict"), [(None, "promote"), (1.05, "promote"), (1.17, "hold"), (2.0, "reject"), (0.0, "promote")]
)
def test_speed_is_judged_only_where_asked(good: EvalReport, asked: float | None, verdict: str) -> None:
    decision = judge(good, min_speedup=asked)
    assert decision.verdict == verdict
    assert check(decision, "speedup:batch_1").reason.startswith("shown") == (asked is None)


@pytest.mark.parametrize(("served", "verdict"), [(1, "promote"), (2, "hold"), (3, "reject")])
def test_the_speed_of_heads_is_judged_at_the_length_that_is_served(good: EvalReport, served: int, verdict: str) -> None:
    """Fast at γ=1, slow at γ=3, the length at which acceptance is judged; γ=2 was not timed."""
    assert good.speed is not None
    points = [
        replace(p, speedup_interval=[1.15, 1.25] if p.num_speculative_tokens == 1 else [0.75, 0.85])
        for p in good.speed.points
    ]
    chain = DraftShape("chain", [[0] * n for n in range(1, served + 1)], 1.5, [1.4, 1.6], 1.5)
    heads = HeadsReport("cpu", 1, "float32", 120, [], [chain], [], [], [], chain_length=served)
    decision = judge(replace(good, speed=replace(good.speed, points=points), heads=heads), min_speedup=1.0)
    assert decision.verdict == verdict
    assert f"at γ={served}," in check(decision, "speedup:batch_1").reason


def test_asked_speed_that_was_not_measured_holds(good: EvalReport) -> None:
    assert judge(replace(good, speed=None)).verdict == "promote"
    assert judge(replace(good, speed=None), min_speedup=1.0).verdict == "hold"


def test_an_interval_of_one_prompt_is_no_certainty(good: EvalReport) -> None:
    assert good.speed is not None
    one = replace(good, speed=replace(good.speed, num_prompts=1))
    assert judge(one, min_speedup=1.05).verdict == "hold"


def test_speed_is_asked_at_every_batch_size_of_the_policy(good: EvalReport) -> None:
    decision = judge(good, min_speedup=1.05, speed_batch_sizes=(1, 8))
    assert decision.verdict == "hold"
    assert check(decision, "speedup:batch_1").passed
    assert "not measured at γ=3, batch size 8" in decision.reason
    assert judge(good, speed_batch_sizes=(8,)).verdict == "promote"
    assert good.speed is not None
    both = replace(good, batch_speeds=[replace(good.speed, batch_size=8)])
    decision = judge(both, min_speedup=1.05, speed_batch_sizes=(1, 8))
    assert decision.verdict == "promote"
    assert check(decision, "speedup:batch_8").observed == check(decision, "speedup:batch_1").observed


@pytest.mark.parametrize(
    ("rule", "limit", "sizes", "verdict"),
    [
        ("acceptance_rate", {"min_acceptance_rate": 0.2}, {}, "promote"),
        ("acceptance_rate", {}, {}, "reject"),
        ("draft_cost_ratio", {}, {}, "promote"),
        ("draft_cost_ratio", {"max_draft_cost_ratio": 0.1}, {}, "reject"),
        ("draft_cost_ratio", {}, {"speed": None}, "hold"),
        ("size_ratio", {}, {"num_target_parameters": 140_000_000}, "promote"),
        ("size_ratio", {}, {"num_target_parameters": 100_000_000}, "reject"),
        ("size_ratio", {}, {}, "hold"),
    ],
)
def test_rules_of_thumb_are_shown_or_required(
    good: EvalReport, rule: str, limit: dict[str, float], sizes: dict[str, Any], verdict: str
) -> None:
    report = replace(good, **sizes)
    shown = judge(report, **limit)
    assert shown.verdict == "promote"
    assert check(shown, f"rule:{rule}").reason.startswith("shown")
    assert judge(report, required_rules=(rule,), **limit).verdict == verdict


def test_attempts_on_the_evaluation_prompts_are_shown(good: EvalReport) -> None:
    decision = decide(make_report(1.05), good, GatePolicy(), report_sha256="f", champion_version="1", attempts=7)
    shown = check(decision, "evaluation_attempts")
    assert shown.observed == 7
    assert "Bonferroni) is 0.0007" in shown.reason
    assert "7" in next(line for line in format_decision(decision).splitlines() if line.startswith("evaluation_att"))


def test_the_speed_of_a_tree_does_not_stand_for_that_of_a_chain(good: EvalReport) -> None:
    assert good.speed is not None
    trees = [replace(point, speedup_interval=[9.0, 9.5], num_tree_nodes=16) for point in good.speed.points]
    for points, verdict in ((trees, "hold"), ([*trees, *good.speed.points], "reject")):
        report = replace(good, speed=replace(good.speed, points=points))
        assert judge(report, min_speedup=2.0).verdict == verdict


def test_e18_both_means_are_named() -> None:
    prompts = [PromptCounts(f"a{i}", "A", 100.0, 100.0, [90.0]) for i in range(10)]
    prompts += [PromptCounts(f"b{i}", "B", 10.0, 10.0, [1.0]) for i in range(10)]
    settings = {"setting": "greedy", "temperature": 0.0, "draft_sample_method": "greedy", "num_speculative_tokens": 1}
    result = acceptance_result(prompts, **settings, draws=50)
    untrained = acceptance_result([replace(p, accepted_at_position=[0.0]) for p in prompts], **settings, draws=50)
    report = replace(make_report(gammas=(1,)), acceptance=[result], untrained=untrained)
    decision = judge(report, min_prompts=20)
    assert check(decision, "acceptance_rate:tokens").observed == pytest.approx(910 / 1100)
    assert check(decision, "acceptance_rate:domains").observed == pytest.approx(0.5)


def test_the_table_is_aligned_and_fits(good: EvalReport) -> None:
    text = format_decision(judge(make_report(0.97), good))
    lines = text.splitlines()
    assert text.startswith("REJECT (against champion version 1)")
    assert max(map(len, lines)) <= 120
    header = next(line for line in lines if line.startswith("check"))
    column = header.index("result")
    rows = [line for line in lines if line.startswith(("report_valid", "gain_over_champion", "domain:code", "speedup"))]
    assert [row[column:].split()[0] for row in rows] == ["ok", "REJECT", "ok", "shown"]
