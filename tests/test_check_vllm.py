"""What scripts/check_vllm.py and its comparison accept and refuse, without vLLM: engines' answers are made by hand."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from report_factory import TARGET, make_report

from scripts import check_vllm, vllm_comparison
from specdist import provenance
from specdist.dataset.manifest import Tally
from specdist.dataset.shards import write_shard
from specdist.errors import ArtifactError
from specdist.metrics import acceptance_result
from specdist.schema import ChatFormat, DatasetInputs, DatasetManifest, DistillRow, PromptCounts, SamplingSpec

GREEDY = SamplingSpec(max_new_tokens=8)
TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
PROMPTS = [f"p{i}" for i in range(4)]


def make_row(prompt_id: str, sampling: SamplingSpec = GREEDY, index: int = 0) -> DistillRow:
    return DistillRow(f"{prompt_id}-{index}", prompt_id, 0, 0, "code", [5, 6, 7], TEXT, "length", sampling, 1)


def make_acceptance(gamma: int, setting: str = "greedy"):
    """Of 7 drafted positions 4 accepted in 3 steps, on every prompt."""
    counts = [PromptCounts(p, "code", 3.0, 7.0, [3.0, 1.0]) for p in PROMPTS]
    return acceptance_result(
        counts, setting=setting, temperature=0.0, draft_sample_method="greedy", num_speculative_tokens=gamma, draws=50
    )


def publish(registry: Path, name: str = "model", **changes) -> Path:
    """A champion with one file of weights; returns its link."""
    version = registry / name / "versions" / "1"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": provenance.sha256_file(version / "model.safetensors")}
    record = {"files": files, "drafter_sha256": "d" * 64, "speculative_config": {"method": "draft_model"}}
    provenance.write_json(version / "export.json", record)
    acceptance = [make_acceptance(2), make_acceptance(4), make_acceptance(8, "t0.8")]
    report = make_report(acceptance=acceptance, num_speculative_tokens=4, **changes)
    provenance.write_json(version / "report.json", report.to_json())
    link = registry / name / "aliases" / "champion"
    link.parent.mkdir()
    link.symlink_to("../versions/1")
    return link


def write_dataset(directory: Path, **changes) -> Path:
    sampled = SamplingSpec(temperature=0.8, max_new_tokens=8)
    rows = [make_row(p, s, i) for p in [*PROMPTS, "short"] for i, s in enumerate([sampled, GREEDY])]
    shard = write_shard(directory, rows, fingerprint="f", engine="x")
    inputs = DatasetInputs(
        target=TARGET,
        prompts_sha256="e" * 64,
        chat_format=ChatFormat(),
        samplings=[sampled, GREEDY],
        max_prompt_tokens=99,
        context_length=999,
        engine="transformers",
        dtype="float32",
        seed=0,
        num_top_logprobs=0,
    )
    tally = Tally()
    for row in rows:
        tally.add(row, "x")
    manifest = DatasetManifest(
        inputs=replace(inputs, **changes),
        num_asked=10,
        rejected={},
        actions={},
        tokens_per_second=None,
        shards={shard.name: provenance.sha256_file(shard)},
        **tally.values(),
    )
    provenance.write_json(directory / "manifest.json", manifest.to_json())
    return directory


def answer(tokens: list[int], accepted: int = 4, drafted: int = 12, best: list | None = None) -> vllm_comparison.Row:
    at_position = [min(accepted, 3), max(accepted - 3, 0)]
    counters = {"num_drafts": 3, "num_draft_tokens": drafted, "accepted_at_position": at_position}
    return {"token_ids": tokens, "best": best or [], **counters}


def plain(gap: float = 1.0) -> vllm_comparison.Row:
    """Output without speculation; token 99 is the runner-up everywhere, by `gap`."""
    return answer(TEXT, 0, 0, [{str(token): -0.1, "99": -0.1 - gap} for token in TEXT])


def outcome_of(tmp_path: Path, others: list[vllm_comparison.Row], gap: float = 1.0, dtype: str = "float32"):
    publish(tmp_path)
    drafter = check_vllm.open_drafter("model", tmp_path, 2)
    rows = [asdict(make_row(p)) for p in PROMPTS]
    return vllm_comparison.compare(drafter, rows, [plain(gap)] * 4, others, dtype)


# What is opened


def test_the_path_given_to_the_engine_is_the_champion_link_itself(tmp_path: Path) -> None:
    link = publish(tmp_path)
    assert check_vllm.champions(tmp_path) == ["model"]
    drafter = check_vllm.open_drafter("model", tmp_path, None)
    assert drafter.path == link
    provenance.write_json(tmp_path / "config.json", {"max_position_embeddings": 4096})
    request = check_vllm.engine_request(tmp_path, drafter, [asdict(make_row("p0"))], [0, 2], "float32")
    assert request["speculative_config"] == {"method": "draft_model", "model": str(link), "num_speculative_tokens": 4}
    assert request["max_model_len"] == 3 + 8 + 2 * (4 + 1)
    assert request["stop_token_ids"] == [0, 2]


def test_a_directory_may_be_named_instead(tmp_path: Path) -> None:
    directory = publish(tmp_path).resolve()
    assert check_vllm.open_drafter(str(directory), tmp_path / "none", None).path == directory
    with pytest.raises(ArtifactError, match="drafter other: neither"):
        check_vllm.open_drafter("other", tmp_path, None)
    with pytest.raises(ArtifactError, match="no champion"):
        check_vllm.champions(tmp_path / "none")


@pytest.mark.parametrize(("asked", "used"), [(None, 4), (2, 2), (3, 2), (9, 4)])
def test_the_draft_length_is_the_longest_measured_up_to_the_one_asked(tmp_path: Path, asked, used: int) -> None:
    publish(tmp_path)
    assert check_vllm.open_drafter("model", tmp_path, asked).acceptance.num_speculative_tokens == used


def test_a_draft_length_below_all_measured_ones_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    with pytest.raises(ArtifactError, match="draft length up to 1"):
        check_vllm.open_drafter("model", tmp_path, 1)


def test_altered_files_and_a_report_about_another_drafter_are_refused(tmp_path: Path) -> None:
    link = publish(tmp_path)
    (link / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(ArtifactError, match=r"model\.safetensors: missing or altered"):
        check_vllm.open_drafter("model", tmp_path, None)
    publish(tmp_path, "other", drafter_sha256="c" * 64)
    with pytest.raises(ArtifactError, match="measured on another drafter"):
        check_vllm.open_drafter("other", tmp_path, None)


def test_another_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/model.safetensors").write_bytes(b"a")
    right = provenance.sha256_json({"model.safetensors": provenance.sha256_bytes(b"a")})
    publish(tmp_path, "right", target=replace(TARGET, weights_sha256=right))
    publish(tmp_path, "wrong")
    drafters = [check_vllm.open_drafter(name, tmp_path, None) for name in ("right", "wrong")]
    check_vllm.check_target(tmp_path / "target", drafters[:1])
    with pytest.raises(ArtifactError, match="not the target of wrong"):
        check_vllm.check_target(tmp_path / "target", drafters)


def test_the_dataset_is_that_of_the_reports_prompts_and_only_counted_greedy_rows_are_read(tmp_path: Path) -> None:
    publish(tmp_path / "registry")
    drafters = [check_vllm.open_drafter("model", tmp_path / "registry", None)]
    right = write_dataset(tmp_path / "run/data/right")
    write_dataset(tmp_path / "run/data/newer", prompts_sha256="b" * 64)
    write_dataset(tmp_path / "run/data/sampled", samplings=[SamplingSpec(temperature=1.0)])
    directory, manifest = check_vllm.find_dataset(None, tmp_path, drafters)
    assert directory == right
    rows = check_vllm.read_rows(directory, manifest, drafters, 3)
    assert [row["prompt_id"] for row in rows] == PROMPTS[:3]
    assert {row["sampling"]["temperature"] for row in rows} == {0.0}
    with pytest.raises(ArtifactError, match="no greedy answers"):
        check_vllm.find_dataset(tmp_path / "run/data/newer", tmp_path, drafters)
    next(right.glob("shard-*")).write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"shard-.*\.parquet: missing or altered"):
        check_vllm.read_rows(directory, manifest, drafters, 3)


# What is judged


def test_equal_tokens_and_counters_pass(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, [answer(TEXT)] * 4)
    assert outcome.problems == []
    assert outcome.num_identical == outcome.same_text == 4
    assert outcome.mean_acceptance_length == outcome.measured_mean_accepted_length == pytest.approx(1 + 4 / 3)
    assert outcome.acceptance_rate == pytest.approx(4 / 12)
    assert outcome.measured_acceptance_rate == pytest.approx(4 / 7)
    assert outcome.same_text_drafts == outcome.same_text_measured_drafts == 12
    shown = vllm_comparison.table([outcome])
    assert "4 of 4" in shown
    assert "passed" in shown


@pytest.mark.parametrize(
    ("gap", "dtype", "is_near"),
    [(0.04, "float32", True), (0.06, "float32", False), (0.2, "bfloat16", True), (0.3, "bfloat16", False)],
)
def test_a_divergence_is_a_near_tie_or_a_failure_by_its_logit_gap(
    tmp_path: Path, gap: float, dtype: str, is_near: bool
) -> None:
    parted = answer([*TEXT[:3], 99, 1, 2])
    outcome = outcome_of(tmp_path, [answer(TEXT)] * 3 + [parted], gap, dtype)
    found = outcome.near_ties if is_near else outcome.different
    assert [(d.prompt_id, d.position) for d in found] == [("p3", 3)]
    assert found[0].logit_gap == pytest.approx(gap)
    assert bool(outcome.problems) is not is_near
    assert outcome.num_identical == outcome.same_text == 3


@pytest.mark.parametrize("tokens", [[*TEXT[:3], 50], TEXT[:5], [*TEXT, 19]], ids=["no runner-up", "shorter", "longer"])
def test_a_divergence_without_a_gap_is_a_failure(tmp_path: Path, tokens: list[int]) -> None:
    outcome = outcome_of(tmp_path, [answer(tokens)] * 4, gap=0.0)
    assert [d.logit_gap for d in outcome.different] == [None] * 4
    assert outcome.problems == ["4 outputs leave the target's own, and not at a near-tie"]
    assert "failed" in vllm_comparison.table([outcome])


@pytest.mark.parametrize(
    ("accepted", "drafted", "problem"),
    [(0, 12, "no drafted token was accepted"), (3, 12, "mean acceptance length differs by -14.3%"), (4, 12, None)],
)
def test_the_mean_acceptance_length_must_be_ours(tmp_path: Path, accepted: int, drafted: int, problem) -> None:
    outcome = outcome_of(tmp_path, [answer(TEXT, accepted, drafted)] * 4)
    assert outcome.problems[:1] == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("at_position", "fails"), [([3, 1], False), ([4, 2], False), ([2, 2], True), ([3, 0], True), ([5, 1], True)]
)
def test_each_position_is_accepted_as_often_but_for_the_ends_of_texts(tmp_path: Path, at_position, fails: bool) -> None:
    outcome = outcome_of(tmp_path, [{**answer(TEXT), "accepted_at_position": at_position}] * 4)
    assert outcome.same_text_measured_at_position == [12.0, 4.0]
    assert outcome.same_text_at_position == [4.0 * count for count in at_position]
    assert any(p.startswith("on the same texts position") for p in outcome.problems) is fails


def test_an_engine_that_drafts_nothing_fails(tmp_path: Path) -> None:
    silent = {**answer(TEXT, 0, 0), "num_drafts": 0}
    assert outcome_of(tmp_path, [silent] * 4).problems[0] == "nothing was drafted"


def test_an_engine_that_cannot_start_shows_the_end_of_its_log() -> None:
    with pytest.raises(ArtifactError, match=r"vLLM failed, exit status 1(.|\n)*Error"):
        check_vllm.run_engine({})


def test_the_command_runs_all_engines_and_writes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    provenance.write_json(target / "config.json", {})
    identity = replace(TARGET, weights_sha256=provenance.sha256_json({}))
    for name in ("a", "b"):
        publish(tmp_path / "registry", name, target=identity)
    write_dataset(tmp_path / "run/data/x", target=identity)
    asked = []

    def run_engine(request: dict) -> list[vllm_comparison.Row]:
        asked.append(request["speculative_config"])
        return [answer(TEXT, 4 if len(asked) < 3 else 0) if asked[-1] else plain() for _ in request["prompts"]]

    monkeypatch.setattr(check_vllm, "run_engine", run_engine)
    monkeypatch.setattr(check_vllm, "version", lambda package: "0.32.0")
    output = tmp_path / "result.json"
    command = ["x", "--target", str(target), "--registry", str(tmp_path / "registry"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    assert check_vllm.main() == 1
    assert [config and Path(config["model"]).parent.parent.name for config in asked] == [None, "a", "b"]
    result = provenance.read_json(output)
    assert [bool(drafter["problems"]) for drafter in result["drafters"]] == [False, True]
    assert not result["passed"]
    assert "b: no drafted token was accepted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--drafter", "a"])
    asked.clear()
    assert check_vllm.main() == 0
