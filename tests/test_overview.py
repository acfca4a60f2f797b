"""`specdist report`: the page of one drafter, and of several the recommendation which of them to serve."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from report_factory import TARGET, make_result
from report_factory import make_report as make_full_report

from specdist import cli
from specdist.evaluation.overview import Judged, recommendation
from specdist.evaluation.overview_page import render_overview
from specdist.evaluation.pictures_of_many import draw_overview
from specdist.evaluation.report import write_report
from specdist.metrics import by_context, pooled_length
from specdist.schema import EvalReport, GateDecision, Speed, SpeedPoint

make_report = partial(make_full_report, gammas=(1, 3), per_domain=3)


def timed(name: str, *points: SpeedPoint, kind: str = "draft_model", cost: float = 0.12, **changes) -> Judged:
    """A drafter whose speed was measured at these points."""
    speed = Speed("AMD EPYC 7R13, 2 cores", "cpu", 2, "bfloat16", 1, 24, 5, 25.0, cost, list(points))
    return Judged(name, make_report(drafter_kind=kind, speed=speed, **changes))


def point(speedup: float, gamma: int = 3, nodes: int | None = None, length: float = 1.8) -> SpeedPoint:
    return SpeedPoint(gamma, 25.0 * speedup, speedup, [speedup - 0.04, speedup + 0.04], length, speedup, nodes)


def elsewhere(drafter: Judged, **changes) -> Judged:
    """The same, timed at other conditions."""
    assert drafter.report.speed is not None
    return replace(drafter, report=replace(drafter.report, speed=replace(drafter.report.speed, **changes)))


def rejected(drafter: Judged) -> Judged:
    return replace(drafter, decision=GateDecision("reject", "slower", [], "0" * 64, None, {}))


def test_the_fastest_is_served_and_the_next_is_told_apart_or_not() -> None:
    fast, close, slow = timed("fast", point(1.4)), timed("close", point(1.35)), timed("slow", point(1.1))
    first, second = recommendation([slow, fast])
    assert first.startswith("Serve fast with γ=3.")
    assert "1.40 times the speed of the target alone (95 % interval 1.36 to 1.44)" in first
    assert second == "Next is slow with γ=3 at 1.10 times: the difference is beyond chance."
    assert "may be chance" in recommendation([close, fast])[1]


def test_no_drafter_is_served_where_none_is_faster_beyond_chance() -> None:
    first = recommendation([timed("one", point(1.02)), timed("two", point(0.8))])[0]
    assert first.startswith("Serve the target without a drafter.")
    assert "the fastest, one with γ=3" in first


def test_what_the_gate_rejected_is_not_recommended_however_fast() -> None:
    said = recommendation([rejected(timed("fast", point(1.9))), timed("slow", point(1.2))])
    assert said[0].startswith("Serve slow")
    assert said[-1].endswith("speaks against it: fast.")
    assert recommendation([rejected(timed("fast", point(1.9)))])[0].startswith("None of them may serve")


def test_trees_and_hydra_come_with_the_best_that_vllm_serves() -> None:
    heads = timed("heads", point(1.3), point(1.5, 4, nodes=8), kind="medusa")
    hydra = timed("hydra", point(1.6), kind="hydra")
    assert recommendation([heads])[-1].startswith(
        "Draft trees run in specdist's own decoder. Of what vLLM serves, heads"
    )
    assert "Of what vLLM serves, heads with γ=3 is the fastest: 1.30 times" in recommendation([hydra, heads])[-1]
    assert "nothing was timed" in recommendation([hydra])[-1]


def test_the_drafter_that_accepts_most_is_named_with_what_its_steps_took() -> None:
    costly = timed("costly", point(0.9, length=2.25), cost=0.55)
    said = recommendation([costly, timed("cheap", point(1.2))])
    assert said[2] == (
        "costly with γ=3 accepts more (2.25 tokens per step against 1.80), but a step with it took about as long as "
        "the target alone needs for 2.50 tokens, against 1.50."
    )


def test_the_winners_tree_is_compared_and_not_its_chain() -> None:
    """The tree that would be served accepts most of all, so nothing accepts more."""
    medusa = timed("medusa", point(1.4, length=2.0), point(1.9, nodes=32, length=2.6), kind="medusa")
    said = recommendation([medusa, timed("draft", point(1.6, length=2.2), strength=1.3)])
    assert said[0].startswith("Serve medusa with a tree of 32 nodes.")
    assert not any("accepts more" in s for s in said)


def test_drafters_are_ranked_at_a_batch_size_that_they_have_in_common() -> None:
    one, large = timed("one", point(1.9)), elsewhere(timed("large", point(2.5)), batch_size=32)
    said = recommendation([large, one])
    assert said[0].startswith("Serve one with γ=3. On AMD EPYC 7R13, 2 cores, bfloat16, batch size 1, it")
    assert said[1:] == ["Not timed at batch size 1, so not ranked with the others: large."]
    both = replace(one, report=replace(one.report, batch_speeds=[replace(one.report.speed, batch_size=32)]))
    said = recommendation([both, large])
    assert said[0].startswith("Serve large with γ=3. On AMD EPYC 7R13, 2 cores, bfloat16, batch size 32, it")
    assert said[1].startswith("Next is one with γ=3 at 1.90 times")


def test_beyond_chance_is_said_only_of_what_was_timed_at_one_place() -> None:
    said = recommendation([timed("one", point(1.4)), elsewhere(timed("two", point(1.1)), hardware="another")])
    assert said[1].endswith("timed elsewhere, so their order says little.")
    assert said[-1].startswith("They were not all timed on the same hardware")


def test_without_speed_no_claim_of_speed_is_made() -> None:
    longest, other = (Judged(n, make_report(s, speed=None)) for n, s in (("longest", 1.2), ("other", 0.9)))
    (said,) = recommendation([other, longest])
    assert said.startswith("Speed was not measured. longest gives the most tokens per step")


def test_drafters_of_different_targets_are_not_ranked() -> None:
    foreign = Judged("foreign", make_report(target=replace(TARGET, weights_sha256="f" * 64)))
    (said,) = recommendation([timed("ours", point(1.4)), foreign])
    assert "different targets" in said
    assert "Serve" not in said


def test_drafters_of_other_prompts_or_answers_are_not_ranked() -> None:
    ours, report = timed("ours", point(1.4)), make_report()
    longer = [replace(result, texts_sha256="9" * 64) for result in report.acceptance]
    for other in (replace(report, eval_prompts_sha256="0" * 64), replace(report, acceptance=longer)):
        (said,) = recommendation([ours, Judged("other", other)])
        assert "measured on other prompts, or on other answers" in said
        assert "Serve" not in said
    older = replace(report, acceptance=[replace(result, texts_sha256=None) for result in report.acceptance])
    moved = replace(older, target=replace(TARGET, model_id="a/directory"))
    assert recommendation([ours, Judged("other", moved)])[0].startswith("Serve ours")


def test_acceptance_by_context_length_counts_every_known_prompt_once() -> None:
    lengths = [5, 127, 128, 255, 256, 4000]
    prompts = make_result(1.0, per_domain=len(lengths), domains={"code": 0.6}, draws=50).prompts
    known = [replace(p, num_prompt_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    groups = by_context([*known, replace(prompts[0], num_prompt_tokens=None)], draws=50)
    assert {name: s.num_prompts for name, s in groups.items()} == {
        "under 128": 2,
        "128 to 255": 2,
        "256 to 511": 1,
        "2048 to 4095": 1,
    }
    assert groups["128 to 255"].mean_accepted_length == pytest.approx(pooled_length(known[2:4]))


def test_the_page_holds_every_drafter_with_its_own_report() -> None:
    drafters = [timed("one", point(1.4)), timed("<two>", point(1.1))]
    page = render_overview(drafters)
    assert page.count("<details>") == 2
    assert "&lt;two&gt;" in page
    assert "<two>" not in page
    assert page.count("<figure>") == len(draw_overview(drafters)) + 2 * 5
    assert all(word in page for word in ("Serve one with γ=3.", "τ by domain", "τ by setting"))


def test_the_command_writes_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, strength in (("weak", 0.8), ("strong", 1.1)):
        (tmp_path / name).mkdir()
        write_report(make_report(strength), tmp_path / name)
    page, png = tmp_path / "page.html", tmp_path / "png"
    named = [str(tmp_path / "weak"), str(tmp_path / "strong/report.json")]
    assert cli.main(["report", *named, "--html", str(page), "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Serve strong with ")
    files = sorted(png.iterdir())
    assert [file.suffix for file in files] == [".png"] * 4
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert cli.main(["report", named[0], "--html", str(page)]) == 0
    assert page.read_text() == (tmp_path / "weak" / "report.html").read_text()
    assert cli.main(["report", named[0], named[0], "--html", str(page)]) == 2
    assert "name each once" in capsys.readouterr().err


def test_a_report_of_before_prompt_lengths_and_texts_still_opens() -> None:
    report = make_report()
    report = replace(report, acceptance=[replace(result, texts_sha256=None) for result in report.acceptance])
    plain = report.to_json()
    for result in plain["acceptance"]:
        del result["texts_sha256"]
        for prompt in result["prompts"]:
            del prompt["num_prompt_tokens"]
    assert EvalReport.from_json(plain) == report
