"""The fit of a draft to its target: what is measured, the rules of thumb, the table, and the command that shows it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from report_factory import make_report, make_speed

from specdist import cli
from specdist.drafter_config import DraftArguments
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.errors import TokenizerMismatch
from specdist.evaluation.fit import MAX_LENGTH, Fit, _step_seconds, measure_fit
from specdist.evaluation.fit_table import (
    ACCEPTANCE_RATES,
    best_lengths,
    comparison_lines,
    fit_json,
    fit_lines,
    predictions,
    rules,
)
from specdist.evaluation.verify_cost import interleaved
from specdist.metrics import independent_mean_accepted_length, pooled_length
from specdist.target import open_target

FIT = Fit(
    target_model="tiny/target",
    draft_model="4 of its 30 layers",
    dtype="bfloat16",
    hardware="two cores",
    num_threads=2,
    target_parameters=100_000_000,
    draft_parameters=20_000_000,
    target_vocab_size=49_152,
    draft_vocab_size=49_152,
    num_tokens=49_152,
    target_step_seconds=0.025,
    draft_cost_ratio=0.2,
    verify_cost_ratios=[1 + 0.05 * i for i in range(MAX_LENGTH)],
)
CPU = torch.device("cpu")


def marks(fit: Fit) -> dict[str, bool]:
    return {rule.name: rule.ok for rule in rules(fit)}


def test_the_fit_of_a_pruned_draft_is_measured(tiny_target_dir: Path) -> None:
    fit = measure_fit(open_target(str(tiny_target_dir)), DraftArguments(draft_layers=[1]), torch.float32, CPU)
    assert fit.draft_model == "1 of its 2 layers"
    assert fit.target_parameters == make_tiny_llama(268).num_parameters()
    assert fit.draft_parameters == make_tiny_llama(268, layers=1).num_parameters()
    assert (fit.target_vocab_size, fit.draft_vocab_size, fit.num_tokens) == (268, 268, 268)
    assert fit.target_step_seconds > 0
    assert fit.draft_cost_ratio > 0
    assert len(fit.verify_cost_ratios) == MAX_LENGTH


def test_a_larger_draft_costs_more(tiny_target_dir: Path) -> None:
    target, ids = make_tiny_llama(268), list(range(200))
    costs = []
    for layers in (1, 12):
        seconds = _step_seconds(target, DraftModelDrafter(make_tiny_llama(268, layers=layers), 268), ids)
        costs.append(seconds[0] / seconds[1])
    assert costs[1] > 3 * costs[0]


def test_sizes_are_measured_in_turn_and_the_warm_up_is_not_counted() -> None:
    calls: list[int] = []
    pauses = iter([0.2] * 3)  # the first of each size alone is slow

    def run(size: int) -> None:
        calls.append(size)
        time.sleep(next(pauses, 0.0))

    seconds = interleaved(run, range(3))
    assert calls[:6] == [0, 1, 2, 0, 1, 2]
    assert max(seconds.values()) < 0.1


@pytest.mark.parametrize("rows", [272, 300])
def test_a_vocabulary_with_other_padding_is_named(tiny_target_dir: Path, tmp_path: Path, rows: int) -> None:
    make_tiny_llama(rows, layers=1).save_pretrained(tmp_path / "draft")
    make_tiny_tokenizer().save_pretrained(tmp_path / "draft")
    init = DraftArguments(init=str(tmp_path / "draft"))
    fit = measure_fit(open_target(str(tiny_target_dir)), init, torch.float32, CPU)
    assert fit.draft_vocab_size == rows
    found = next(rule.found for rule in rules(fit) if rule.name == "vocabulary")
    assert found == f"same tokenizer, 268 tokens; padded {rows} rows become the target's 268"


def test_another_tokenizer_is_refused_before_anything_is_measured(tiny_target_dir: Path, tmp_path: Path) -> None:
    make_tiny_llama(269).save_pretrained(tmp_path / "draft")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(tmp_path / "draft")
    with pytest.raises(TokenizerMismatch, match=r"<\|other\|>"):
        measure_fit(open_target(str(tiny_target_dir)), DraftArguments(init=str(tmp_path / "draft")), torch.float32, CPU)


def test_rules_of_thumb_at_their_bounds() -> None:
    assert marks(FIT) == {"speed": True, "size": True, "gain at 70%": False, "vocabulary": True}
    assert not marks(replace(FIT, draft_cost_ratio=0.201))["speed"]
    assert not marks(replace(FIT, draft_parameters=20_000_001))["size"]
    assert marks(replace(FIT, draft_cost_ratio=0.05))["gain at 70%"]


@pytest.mark.parametrize("measured", [True, False])
def test_e16_the_table_is_the_formula(measured: bool) -> None:
    rows = predictions(FIT, measured_verify=measured)
    assert [row.num_speculative_tokens for row in rows] == list(range(1, 11))
    for row in rows:
        gamma = row.num_speculative_tokens
        verify = FIT.verify_cost_ratios[gamma - 1] if measured else 1.0
        for rate, speedup in zip(ACCEPTANCE_RATES, row.speedups, strict=True):
            length = sum(rate**i for i in range(gamma + 1))
            assert speedup == pytest.approx(length / (gamma * 0.2 + verify))
    best = best_lengths(rows)
    for i, rate in enumerate(ACCEPTANCE_RATES):
        values = {row.num_speculative_tokens: row.speedups[i] for row in rows}
        assert best[i] == (max(values, key=values.get) if max(values.values()) > 1 else None), rate


def test_a_draft_that_never_pays_says_so() -> None:
    rows = predictions(replace(FIT, draft_cost_ratio=1.2), measured_verify=True)
    assert {row.break_even_acceptance_rate for row in rows} == {None}
    assert set(best_lengths(rows)) == {None}
    assert "never" in "\n".join(fit_lines(replace(FIT, draft_cost_ratio=1.2)))


def test_columns_are_aligned_and_fit_a_terminal() -> None:
    lines = fit_lines(FIT)
    assert max(map(len, lines)) <= 120
    head = next(i for i, line in enumerate(lines) if "break-even" in line)
    assert len({len(line) for line in lines[head : head + MAX_LENGTH + 2]}) == 1


def test_the_comparison_predicts_from_the_replay_of_the_timed_prompts() -> None:
    report = make_report()
    gamma = report.primary.num_speculative_tokens
    timed = report.primary.prompts[:5]
    speed = make_speed({gamma: 1.7})
    line = comparison_lines(FIT, report, speed, {p.prompt_id for p in timed})[-1].split()
    tau = pooled_length(timed)
    assert tau != pytest.approx(report.primary.summary.mean_accepted_length, abs=0.01)
    drafted = sum(p.num_draft_tokens for p in timed) / sum(p.num_drafts for p in timed)
    predicted = tau / (drafted * 0.2 + FIT.verify_cost_ratios[gamma - 1])
    expected = [drafted, tau, 1.7, predicted, speed.points[0].speedup]
    assert line[:6] == [str(gamma), *(f"{value:.2f}" for value in expected)]


def test_advise_prints_the_table_and_writes_the_numbers(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDIST_NUM_THREADS", "1")
    path = tmp_path / "fit.json"
    arguments = ["advise", "--target", str(tiny_target_dir), "--draft_layers", "1", "--dtype", "float32"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    shown, written = capsys.readouterr().out, json.loads(path.read_text())
    fit = Fit.from_json({key: written[key] for key in FIT.to_json()})
    assert shown.splitlines() == fit_lines(fit)
    assert written == json.loads(json.dumps(fit_json(fit)))
    low = written["predictions_verify_cost_1"][3]["speedups"][0]
    assert low == pytest.approx(independent_mean_accepted_length(0.3, 4) / (4 * fit.draft_cost_ratio + 1))


def test_advise_takes_a_recipes_configuration_and_the_command_line_before_it(
    tiny_target_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDIST_NUM_THREADS", "1")
    config = ["--config", "recipes/configs/tiny/draft.yaml", "--target", str(tiny_target_dir)]
    assert cli.main(["advise", *config]) == 2
    assert "draft_layers [0, 3]: expected one or more different layers, 0 to 1" in capsys.readouterr().err
    assert cli.main(["advise", *config, "--draft_layers", "0"]) == 0
    assert "fit of a draft (1 of its 2 layers) to tiny-target" in capsys.readouterr().out


def test_advise_needs_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise"]) == 2
    assert "name a --target, or a recipe's --config" in capsys.readouterr().err
