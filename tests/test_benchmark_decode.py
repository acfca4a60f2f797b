"""Benchmarks of decoding and replay on tiny models: all ways write the target's text, and a killed run goes on."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import benchmark_decode
import benchmark_replay
import pytest
import torch
from benchmark_decode import Line, Timing, Totals, bar, bars
from benchmark_log import RawLog
from benchmark_replay import Compared, cost_words, judged
from conftest import make_tiny_llama
from decode_ways import DRAFT, GENERATE, LOOP
from heads_factory import export_heads, make_heads
from test_decode_command import save_target

from specdist.drafters.prune import prune_layers
from specdist.errors import ArtifactError
from specdist.export.draft_model import export_draft_model
from specdist.schema import SamplingSpec
from specdist.target import open_target
from specdist.tree import DraftTree

WORDS = ["the inn", "an other thing", "a thin hen", "on the other hand"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, exports of a draft model (draft/) and of heads with a tree (heads/), prompts of two domains."""
    directory = tmp_path_factory.mktemp("benchmark")
    target = open_target(str(save_target(make_tiny_llama(268, layers=4, seed=3), directory / "target")))
    settings = {"dtype": torch.float32, "num_speculative_tokens": 2, "checkpoint_step": 7}
    draft = prune_layers(target.load_model(torch.float32), [0, 2, 3])
    export_draft_model(draft, target, directory / "draft" / "export", **settings)
    export_heads(target, directory / "heads" / "export", make_heads(), tree=DraftTree.of([[0], [1], [0, 0]], 3))
    rows = [
        {"id": f"p{i}", "domain": "ab"[i % 2], "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(WORDS)
    ]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(files: Path, output: Path, *more: str) -> list[str]:
    shared = ["--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output", str(output)]
    return [*shared, "--dtype", "float32", "--threads", "1", "--max-new-tokens", "12", *more]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of transformers' own assisted generation
def test_all_ways_write_the_targets_text_and_a_run_that_was_killed_goes_on(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--drafter", str(files / "draft"), "--lengths", "1", "3", "--policies", "last-block", "pays"]
    asked = arguments(files, tmp_path, *more, "--heads", str(files / "heads"))
    benchmark_decode.main([*asked, "--num-prompts", "2"])
    log = tmp_path / "timings.jsonl"
    before = log.read_text()
    log.write_text(before + '{"prompt_id": "p3", "do')
    benchmark_decode.main([*asked, "--num-prompts", "4"])
    assert log.read_text().startswith(before)
    assert [json.loads(line)["prompt_id"] for line in log.read_text().splitlines()[1:]] == ["p0", "p2", "p1", "p3"]
    printed = (tmp_path / "decode.md").read_text()
    assert capsys.readouterr().out.rstrip().endswith(printed.rstrip())
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \| .* \| (\d of \d) \|$", printed, flags=re.MULTILINE)
    ways = ["n-gram, γ=4", "draft model, γ=1", "draft model, γ=3", "draft model, by last-block", "draft model, by pays"]
    ways += [f"assisted generation, {words}" for words in ("γ=1", "γ=3", "its defaults")]
    ways = [GENERATE, LOOP, *ways, "Medusa chain, γ=3", "Medusa tree of 3"]
    assert rows == [(way, "4 of 4") for way in ways] + [(way, "2 of 2") for way in ways] * 2
    assert "### a, 2 prompts" in printed
    with pytest.raises(ArtifactError, match="holds results of other settings, of max_new_tokens 12"):
        benchmark_decode.main([*asked, "--max-new-tokens", "13"])


def totals(*timings: Timing) -> Totals:
    return Totals([Line(f"p{i}", "d", {"way": timing}) for i, timing in enumerate(timings)], "way")


def test_a_way_is_the_sum_of_its_texts() -> None:
    way = totals(Timing(11, 2.0, 0.5, 1.2, 0.2, 6, 15), Timing(21, 3.0, 1.0, 1.8, 0.3, 11, 30, same=False))
    assert (way.rate, way.tau, way.block) == (32 / 5.0, 30 / 15, 45 / 15 - 1)
    assert (way.drafting, way.verifying, way.overhead) == pytest.approx((1.5, 3.0, 0.5))
    assert way.step_seconds == pytest.approx((3.0 - 0.5) / 15)
    assert way.same == 1


def test_a_bar_that_is_missed_names_the_cost_that_eats_it() -> None:
    alone = Timing(11, 2.2, 0.0, 2.1, 0.1, 11, 10)
    ours = Timing(11, 2.0, 0.9, 0.9, 0.1, 5, 8)  # 4 steps, whose pass takes 0.2 s, as one of a single token does
    named = {LOOP: totals(alone), GENERATE: totals(alone), DRAFT.format(1): totals(ours)}
    said = bar(named, DRAFT.format(1), GENERATE, 1.3)
    assert said.startswith("* NOT HELD: draft model, γ=1: 1.10 (1.10 to 1.10) times target alone, generate, at least")
    costs = ["Without the time of drafting 2.00", "without overhead 1.22", "as cheap as one token 1.10"]
    assert re.findall("|".join(costs), said, flags=re.IGNORECASE) == costs
    assert bar(named, DRAFT.format(1), GENERATE, 1.05).startswith("* held: ")
    lines = [Line("p", "d", {GENERATE: alone, LOOP: alone, DRAFT.format(1): ours})]
    assert [line.split(":")[0] for line in bars(lines, [GENERATE, LOOP], [])] == ["* held"]


def test_an_empty_log_is_made_with_its_settings(tmp_path: Path) -> None:
    log = RawLog(tmp_path / "new" / "log.jsonl", {"dtype": "float32"})
    log.add({"prompt_id": "é"})
    assert RawLog(log.path, {"dtype": "float32"}).prompt_ids == {"é"}


@pytest.mark.parametrize(("drafter", "temperature", "lengths"), [("draft", "0", 10), ("heads", "0.8", 3)])
def test_e16_replay_and_decoding_agree_at_every_draft_length(
    files: Path, tmp_path: Path, drafter: str, temperature: str, lengths: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(files, tmp_path, "--drafter", str(files / drafter), "--temperature", temperature)
    benchmark_replay.main([*asked, "--num-prompts", "2"])
    log = tmp_path / "replay.jsonl"
    before = log.read_text()
    benchmark_replay.main([*asked, "--num-prompts", "3"])
    assert log.read_text().startswith(before)
    printed = capsys.readouterr().out
    if temperature == "0":
        held = re.findall(r"^held: γ=(\d+), texts with other steps than replay's: 0,", printed, flags=re.MULTILINE)
        assert held == [str(n) for n in range(1, lengths + 1)] * 2
    rows = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert len(rows) == 3
    for row in rows:
        assert [len(values) for values in row["accept"]] == [lengths] * len(row["completion_ids"])
        assert list(row["decoded"]) == [str(n) for n in range(1, lengths + 1)]
    table = re.findall(r"^\| (\d+) \| [\d.]+ \(", (tmp_path / "replay.md").read_text(), flags=re.MULTILINE)
    assert table == [str(n) for n in range(1, lengths + 1)]
    assert f"replay at all {lengths} draft lengths beside decoding" in printed


def test_e16_intervals_are_compared_on_the_same_texts() -> None:
    compared = Compared(4, (1.5, [1.4, 1.6]), (1.61, [1.5, 1.7]), (1.6, [1.55, 1.65]), 3, 3)
    assert compared.width_ratio == pytest.approx(0.5)
    assert not compared.inside
    assert replace(compared, decoded=(1.59, [1.5, 1.7])).inside
    assert judged([compared], SamplingSpec(temperature=0.8)) == [False, True]
    assert judged([compared, replace(compared, num_same=2)], SamplingSpec()) == [True, False]


def test_the_cost_of_replay_is_that_of_all_lengths() -> None:
    rows = [{"read_seconds": 1.0, "write_seconds": 8.0, "decoded": {"1": {"seconds": 40.0}, "2": {"seconds": 30.0}}}]
    words, ratio = cost_words(rows, 10, [1, 2], 0.4)
    assert ratio == pytest.approx(1.4 / 70.0)
    assert "1/50" in words
