"""Files of a report: what is written comes back, the page is self-contained and honest, the table is aligned."""

import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_factory import divergence, make_report, make_speed

from specdist.errors import ArtifactError
from specdist.evaluation.page import render_page
from specdist.evaluation.page_parts import bounds
from specdist.evaluation.pictures import draw_pictures
from specdist.evaluation.report import read_report, summary_table, write_report
from specdist.evaluation.summary import gain_over_untrained, sentences
from specdist.gate import GatePolicy, decide
from specdist.schema import Certification, EvalReport, Fidelity, GateCheck, GateDecision

GAMMAS = (1, 2, 3, 4, 5)
VOID = {"meta", "img", "br", "hr"}


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return make_report(per_domain=6)


@pytest.fixture(scope="module")
def page(report: EvalReport) -> str:
    return render_page(report)


def decision(verdict: str = "hold") -> GateDecision:
    checks = [
        GateCheck("prompts", False, 72.0, 100.0, None, verdict, "72 prompts <few> & shown"),
        GateCheck("speedup", True, None, None, None, "hold", "shown: not measured at γ=3"),
    ]
    return GateDecision(verdict, "prompts: too few", checks, "f" * 64, "4", {})


class Tags(HTMLParser):
    """Collects tags and attributes, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# --- Files


def test_what_is_written_comes_back(report: EvalReport, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    assert read_report(tmp_path) == report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_showing_a_decision_leaves_the_json_as_it_was(report: EvalReport, tmp_path: Path) -> None:
    digests = []
    for verdict in (None, decision()):
        write_report(report, tmp_path, verdict)
        digests.append(hashlib.sha256((tmp_path / "report.json").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert "Gate: hold" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_g6_a_number_that_is_not_finite_is_refused(report: EvalReport, tmp_path: Path, value: float) -> None:
    assert report.speed is not None
    bad = replace(report, speed=replace(report.speed, draft_cost_ratio=value))
    with pytest.raises(ArtifactError, match="finite"):
        write_report(bad, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_names_the_file(report: EvalReport, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"report\.json: no such file"):
        read_report(tmp_path)
    plain = report.to_json()
    del plain["untrained"]
    (tmp_path / "report.json").write_text(json.dumps(plain))
    with pytest.raises(ArtifactError, match=r"report\.json: missing keys \['untrained'\]"):
        read_report(tmp_path)


def test_equal_reports_give_equal_pages(report: EvalReport, page: str) -> None:
    assert render_page(EvalReport.from_json(report.to_json())) == page


# --- The page


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    attributes = Tags(page).attributes
    links = [value for _, name, value in attributes if name in ("src", "href", "srcset", "action")]
    assert len(links) == 5
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", page)
    assert "default-src 'none'" in page


def test_pictures_have_titles_and_descriptions_with_numbers(report: EvalReport, page: str) -> None:
    alts = [value for tag, name, value in Tags(page).attributes if (tag, name) == ("img", "alt")]
    titles = ["by position", "against draft length", "Measured speed", "by checkpoint", "by domain"]
    assert all(title in alt for title, alt in zip(titles, alts, strict=True))
    assert all(re.search(r"\d\.\d\d", alt) for alt in alts)
    pictures = draw_pictures(report)
    assert len(pictures) == len(titles)
    assert all(b"<svg" in picture.svg and b"http-equiv" not in picture.svg for picture in pictures)


def test_the_page_names_the_numbers(report: EvalReport, page: str) -> None:
    assert report.primary is not None
    summary = report.primary.summary
    assert f"{summary.mean_accepted_length:.2f}" in page
    assert f"{summary.acceptance_rate:.1%}" in page
    assert "AMD EPYC 7R13, 2 cores" in page
    assert all(domain in page for domain in report.primary.domains)
    assert "mean of domains" in page


def test_all_text_is_escaped(report: EvalReport) -> None:
    nasty = "<script>alert('x')</script>"
    target = replace(report.target, model_id=nasty)
    text = render_page(replace(report, target=target, drafter_kind=nasty, invalid_reasons=[nasty]), decision())
    Tags(text)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "72 prompts &lt;few&gt; &amp; shown" in text


def test_a_report_with_little_in_it_still_renders(report: EvalReport) -> None:
    bare = replace(report, acceptance=[], checkpoints=[], certifications=[], fidelity=None, speed=None)
    text = render_page(bare)
    Tags(text)
    assert "nothing can be concluded" in text
    assert "Replay was not checked" in text
    assert "<img" not in text
    assert draw_pictures(bare) == []


def test_a_single_draft_length_and_domain_render(report: EvalReport) -> None:
    small = make_report(gammas=(1,), per_domain=3, domains={"all": 0.5})
    Tags(render_page(small))
    assert len(draw_pictures(small)) == 5


def test_the_gates_decision_is_shown_with_reasons(report: EvalReport) -> None:
    judged = decide(report, None, GatePolicy(), report_sha256="f", champion_version=None)
    text = render_page(report, judged)
    Tags(text)
    assert judged.verdict == "hold"
    assert "Gate: hold" in text
    assert "72 prompts with drafts" in text
    assert all(check.name in text for check in judged.checks)


# --- Words


def test_words_about_speed_follow_the_interval(report: EvalReport) -> None:
    def words(length: float, cost: float) -> str:
        return " ".join(sentences(replace(report, speed=make_speed(dict.fromkeys(GAMMAS, length), cost))))

    assert "times as fast as the target alone" in words(1.9, 0.1)
    assert "the best of 5 measured" in words(1.9, 0.1)
    assert "slower than the target alone" in words(1.3, 0.4)
    assert "no difference" in words(1.24, 0.12)
    assert "not measured" in " ".join(sentences(replace(report, speed=None)))


def test_words_about_gain_follow_the_interval(report: EvalReport) -> None:
    assert report.primary is not None
    assert "training gained" in " ".join(sentences(report))
    assert "no gain" in " ".join(sentences(replace(report, untrained=report.primary)))
    better = make_report(1.3, per_domain=6).primary
    assert better is not None
    assert "made it worse" in " ".join(sentences(replace(report, untrained=better)))
    other = make_report(0.2, per_domain=2).primary
    assert other is not None
    assert "not known" in " ".join(sentences(replace(report, untrained=other)))


@pytest.mark.parametrize(
    ("lossless", "fidelity", "words"),
    [
        (True, Fidelity("float32", 24, 24, []), "stays the target's own: 24 of 24"),
        (True, Fidelity("bfloat16", 24, 23, [divergence(near_tie=True)]), "near-ties"),
        (True, Fidelity("float32", 24, 23, [divergence(near_tie=True)]), "not the target's own"),
        (True, Fidelity("bfloat16", 24, 23, [divergence(near_tie=False)]), "not the target's own"),
        (True, None, "not tested"),
        (False, Fidelity("float32", 24, 24, []), "may change the output"),
    ],
)
def test_words_about_the_output(report: EvalReport, lossless: bool, fidelity: Fidelity | None, words: str) -> None:
    assert words in " ".join(sentences(replace(report, lossless=lossless, fidelity=fidelity)))


def test_gain_is_that_of_the_ratio(report: EvalReport) -> None:
    assert report.primary is not None
    gain = gain_over_untrained(report)
    assert gain is not None
    ratio = report.primary.summary.mean_accepted_length / report.untrained.summary.mean_accepted_length
    assert gain[0] == pytest.approx(ratio - 1.0)
    assert gain[1] is not None
    assert gain[1][0] < gain[0] < gain[1][1]


# --- The table


def test_the_summary_table_is_aligned(report: EvalReport) -> None:
    text = summary_table({"draft model": (report, decision("promote")), "x": (replace(report, speed=None), None)})
    head, rule, *rows = text.splitlines()
    assert len(rows) == 2
    assert set(rule) == {"-"}
    assert max(map(len, text.splitlines())) <= 125
    for column, expected in (("verdict", ["promote", "not judged"]), ("drafter", ["draft model", "x"])):
        start = head.index(column)
        assert [row[start:].split("  ")[0].strip() for row in rows] == expected
    assert report.primary is not None
    assert f"{report.primary.summary.acceptance_rate:.1%}" in rows[0]
    assert "tok/s" in rows[0]
    assert "not measured" in rows[1]


def test_the_best_speed_is_in_the_table(report: EvalReport) -> None:
    slow = replace(report, speed=make_speed({1: 1.2, 4: 2.9}, 0.1))
    assert "at γ=4" in summary_table({"a": (slow, None)})


def test_a_tree_is_named_as_such_and_is_no_draft_length(report: EvalReport, tmp_path: Path) -> None:
    speed = make_speed({2: 1.6, 4: 1.9})
    tree = replace(speed.points[1], speedup=9.0, num_tree_nodes=16)
    with_tree = replace(report, speed=replace(speed, points=[*speed.points, tree]))
    write_report(with_tree, tmp_path)
    assert read_report(tmp_path) == with_tree
    assert "9.00x at tree of 16 nodes" in summary_table({"a": (with_tree, None)})
    assert "with a tree of 16 nodes, the best of 3 measured" in " ".join(sentences(with_tree))
    pictures = [[p.svg for p in draw_pictures(r)] for r in (with_tree, replace(report, speed=speed))]
    assert pictures[0] == pictures[1]


def test_only_of_greedy_certificates_differing_prompts_are_told(report: EvalReport) -> None:
    sampled = Certification("t0.8", 4, 50, 2.0, 2.5, [1.9, 2.1], [], False)
    greedy = replace(sampled, setting="greedy", mismatched_prompts=["code-00"])
    text = render_page(replace(report, certifications=[sampled]))
    assert "not confirmed" in text
    assert "differ)" not in text
    assert "not confirmed (1 prompt differs)" in render_page(replace(report, certifications=[greedy]))


def test_speed_at_several_batch_sizes_has_a_table_each_and_a_picture(report: EvalReport, tmp_path: Path) -> None:
    assert report.speed is not None
    batched = replace(report, batch_speeds=[replace(report.speed, batch_size=size) for size in (4, 16)])
    write_report(batched, tmp_path)
    assert read_report(tmp_path) == batched
    text = render_page(batched)
    assert all(f"Measured speed, batch size {size}" in text for size in (1, 4, 16))
    assert "against batch size" in text
    assert "at γ = 3 and batch size 1, 4, 16" in text
    assert len(draw_pictures(batched)) == 1 + len(draw_pictures(report))


def test_a_report_written_before_there_were_trees_or_batches_still_loads(report: EvalReport) -> None:
    plain = report.to_json()
    del plain["batch_speeds"]
    for point in plain["speed"]["points"]:
        del point["num_tree_nodes"]
    assert EvalReport.from_json(plain) == report


def test_an_interval_of_no_width_is_not_told_as_certainty() -> None:
    assert bounds([1.026, 1.026], 3) == "-"
    assert bounds([1.137, 1.238], 3) == "1.137 to 1.238"
