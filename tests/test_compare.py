"""`specdist compare`: differences with intervals on the same prompts, and what cannot be compared."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from registry_factory import empty_database, make_export
from report_factory import DOMAINS, make_result
from report_factory import make_report as make_full_report

from specdist import cli
from specdist.evaluation.compare import Comparison, compare_reports, comparison_lines
from specdist.evaluation.compare_page import render_comparison
from specdist.metrics import pooled_length
from specdist.provenance import write_json
from specdist.registry.store import Registry
from specdist.schema import EvalReport
from specdist.stages.report import read_named

make_report = partial(make_full_report, gammas=(1, 3), per_domain=6)


@pytest.fixture(scope="module")
def weak() -> EvalReport:
    return make_report()


@pytest.fixture(scope="module")
def mixed() -> EvalReport:
    """Better everywhere but in code."""
    return make_report(domains={d: rate * (0.5 if d == "code" else 1.15) for d, rate in DOMAINS.items()})


def compared(first: EvalReport, second: EvalReport) -> Comparison:
    return compare_reports(first, second, ("weak", "strong"))


def test_differences_are_of_the_second_less_the_first(weak: EvalReport, mixed: EvalReport) -> None:
    comparison = compared(weak, mixed)
    assert comparison.objections == []
    assert [row.name for row in comparison.settings] == ["greedy", "t0.8"]
    assert weak.primary is not None
    assert mixed.primary is not None
    expected = pooled_length(mixed.primary.prompts) - pooled_length(weak.primary.prompts)
    overall = comparison.overall
    assert overall is not None
    assert overall.difference == pytest.approx(expected)
    assert overall.interval[0] < expected < overall.interval[1]
    assert {row.name: row.words for row in comparison.domains} == {
        d: "less" if d == "code" else "more" for d in DOMAINS
    }
    assert all(row.p_value is not None and row.p_value < 0.1 for row in comparison.domains)
    assert [row.name for row in comparison.positions] == ["1", "2", "3"]
    first = comparison.positions[0]
    rates = [r.primary.summary.acceptance_at_position[0] for r in (weak, mixed) if r.primary is not None]
    assert first.values == pytest.approx(rates)
    assert first.interval[0] < first.difference < first.interval[1]


def test_turned_round_the_signs_turn(weak: EvalReport, mixed: EvalReport) -> None:
    there, back = compared(weak, mixed), compared(mixed, weak)
    assert len(there.domains) == len(DOMAINS)
    for one, other in zip(there.domains, back.domains, strict=True):
        assert one.difference == pytest.approx(-other.difference)
        assert one.p_value == pytest.approx(other.p_value)


def test_a_drafter_does_not_differ_from_itself(weak: EvalReport) -> None:
    comparison = compared(weak, weak)
    assert comparison.settings
    assert comparison.positions
    for row in (*comparison.settings, *comparison.positions):
        assert row.difference == 0
        assert row.interval == [0, 0]
        assert row.words == "no difference shown"
        assert row.p_value in (None, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eval_prompts_sha256": "0" * 64}, "other prompts: 72 and 72, of which 72 have the same id"),
        ({"acceptance": [make_result(1.0, per_domain=5)], "untrained": make_result(0.1, per_domain=5)},
         "other prompts: 72 and 60, of which 60"),
        ({"acceptance": [make_result(1.0, gamma=2, per_domain=6)], "num_speculative_tokens": 2,
          "untrained": make_result(0.1, gamma=2, per_domain=6)}, "was not measured at greedy γ=3"),
        ({"acceptance": [replace(make_result(1.0, per_domain=6), texts_sha256="9" * 64)],
          "untrained": replace(make_result(0.1, per_domain=6), texts_sha256="9" * 64)},
         "the second was measured on other answers to the same prompts"),
        ({"num_training_rows": 7, "invalid_reasons": ["the template differs"]}, "strong: the template differs"),
        ({"speed": None, "acceptance": []}, "strong: no acceptance at the primary setting"),
    ],
)  # fmt: skip
def test_unlike_reports_are_said_to_be_incomparable(weak: EvalReport, change: dict, words: str) -> None:
    comparison = compared(weak, replace(weak, **change))
    assert any(words in objection for objection in comparison.objections)
    assert comparison.settings == comparison.domains == comparison.positions == []
    text, page = "\n".join(comparison_lines(comparison)), render_comparison(comparison)
    assert f"not comparable: {comparison.objections[0]}" in text
    assert "Not comparable" in page
    assert "<img" not in page


def test_what_was_sampled_otherwise_is_left_out_and_an_older_report_is_remarked_on(weak: EvalReport) -> None:
    sampled = [replace(r, texts_sha256="9" * 64 if r.temperature else r.texts_sha256) for r in weak.acceptance]
    comparison = compared(weak, replace(weak, acceptance=sampled))
    assert [row.name for row in comparison.settings] == ["greedy"]
    assert comparison.remark == ""
    older = compared(weak, replace(weak, acceptance=[replace(r, texts_sha256=None) for r in weak.acceptance]))
    assert [row.name for row in older.settings] == ["greedy", "t0.8"]
    assert older.remark in comparison_lines(older)
    assert "does not say how its texts were written" in render_comparison(older)


def test_a_target_under_another_name_is_the_same(weak: EvalReport) -> None:
    assert compared(weak, replace(weak, target=replace(weak.target, model_id="a/directory"))).objections == []


def test_other_targets_and_numbers_that_are_none_are_incomparable(weak: EvalReport) -> None:
    other = replace(weak, target=replace(weak.target, weights_sha256="0" * 64))
    assert "other targets" in compared(weak, other).objections[0]
    assert weak.speed is not None
    broken = replace(weak, speed=replace(weak.speed, target_tokens_per_second=math.nan))
    assert "not finite" in compared(weak, broken).objections[0]


class Images(HTMLParser):
    """Sources of the page's images, and every address that it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.alternatives: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.alternatives.append(values["alt"] or "")
        self.addresses += [v for key, v in attrs if key in ("src", "href") and v and not v.startswith("data:")]


def test_the_page_needs_nothing_else_and_says_what_it_shows(weak: EvalReport, mixed: EvalReport) -> None:
    page = render_comparison(compared(weak, mixed))
    images = Images(page)
    assert images.addresses == []
    assert len(images.alternatives) == 3
    assert images.alternatives[0].startswith("What B gains over A, greedy. Difference of τ by domain: code -")
    assert "B gives more tokens per step" in page
    assert "worse in 1: code" in page


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, weak: EvalReport, mixed: EvalReport) -> Path:
    directory = tmp_path_factory.mktemp("published")
    (directory / "registry").mkdir()
    (directory / "registry" / "mlflow.db").write_bytes(empty_database())
    registry = Registry(directory / "registry", "alpha")
    for name, report, expected in (("weak", weak, None), ("mixed", mixed, "1")):
        write_json(directory / name / "report.json", report.to_json())
        files = {"report.json": directory / name / "report.json"}
        export = make_export(directory / name / "export", name)
        registry.publish(export, files=files, tags={}, expected_champion=expected)
    return directory


def test_runs_versions_champions_and_files_are_found(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], weak: EvalReport, mixed: EvalReport
) -> None:
    root, versions = published / "registry", published / "registry/alpha/versions"
    for name in (published / "weak", published / "weak" / "report.json", versions / "1", "alpha@1"):
        assert read_named(str(name), root).report == weak
    for name in (published / "mixed", root / "alpha/aliases/champion", "alpha"):
        assert read_named(str(name), root).report == mixed
    argv = ["compare", str(published / "weak" / "report.json"), "alpha", "--html", str(tmp_path / "page.html")]
    assert cli.main([*argv, "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"A  {published.name}/weak: draft_model, ")
    assert str(published) not in out
    assert out.endswith(f"page: {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    row = next(line for line in out.splitlines() if line.startswith("code"))
    assert row.endswith("less")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"nowhere: no report\.json, .* has the models \['alpha'\]"),
        ("alpha@9", "no version 9"),
        (".", r"report\.json: no such file"),
    ],
)
def test_what_is_no_report_is_named(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    argv = ["compare", name, str(published / "weak"), "--root", str(published / "registry")]
    assert cli.main(argv) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "compare.html").exists()


def test_a_report_of_another_form_is_named(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((published / "weak" / "report.json").read_text())
    del data["acceptance"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    shutil.copy(published / "weak" / "report.json", tmp_path / "other.json")
    assert cli.main(["compare", str(tmp_path / "report.json"), str(tmp_path / "other.json")]) == 2
    assert "report.json: missing keys ['acceptance']" in capsys.readouterr().err
