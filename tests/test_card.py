"""The model card: Hugging Face's format, every number of the report, what is unknown said, scripts that run."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import make_tiny_llama
from heads_factory import export_heads, make_heads
from huggingface_hub import ModelCard
from report_factory import make_report as make_full_report

from specdist.drafter_config import OWN
from specdist.evaluation.card import UNKNOWN, model_card
from specdist.export.draft_model import export_draft_model
from specdist.export.record import ExportRecord
from specdist.gate import decide, load_policy
from specdist.schema import (
    ChatFormat,
    DatasetInputs,
    DatasetManifest,
    EvalReport,
    GateDecision,
    SamplingSpec,
)
from specdist.schema_quality import TargetQuality
from specdist.target import Target, open_target

make_report = partial(make_full_report, gammas=(1, 3), per_domain=4)
NAME = "tiny-draft"


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def draft(target: Target, directory: Path) -> ExportRecord:
    model = make_tiny_llama(target.identity.vocab_size, seed=5)
    model.config.eos_token_id = target.identity.eos_token_ids
    dtype = next(model.parameters()).dtype
    return export_draft_model(model, target, directory, dtype=dtype, num_speculative_tokens=3, checkpoint_step=7)


def manifest(record: ExportRecord, **changes: object) -> DatasetManifest:
    samplings = [SamplingSpec(0.0, max_new_tokens=96), *2 * [SamplingSpec(0.7, 40, 0.95, 96)]]
    inputs = DatasetInputs(
        record.target, "1" * 64, ChatFormat("Be brief."), samplings, 512, 2048, "transformers", "bfloat16", 0, 0
    )
    values = {"num_prompts": 100, "num_asked": 300, "num_rows": 299, "num_truncated": 12, "num_prompt_tokens": 900}
    counts = {"num_completion_tokens": 20_000, "num_supervised_tokens": 20_000, "rejected": {}, "actions": {}}
    rest = {"finish_reasons": {"stop": 299}, "domains": {"code": 299}, "engines": {"transformers 5.24.0": 299}}
    more = {"tokens_per_second": None, "rows_sha256": "2" * 64, "shards": {}}
    return replace(DatasetManifest(inputs, **values, **counts, **rest, **more), **changes)


def judged(report: EvalReport) -> GateDecision:
    policy = load_policy(Path("recipes/configs/gate.yaml"))
    return decide(report, None, policy, report_sha256="f" * 64, champion_version=None)


def measured(record: ExportRecord, **changes: object) -> EvalReport:
    return replace(make_report(), target=record.target, drafter_sha256=record.drafter_sha256, **changes)


def test_the_front_matter_is_what_hugging_face_reads(target: Target, tmp_path: Path) -> None:
    record = draft(target, tmp_path / "export")
    record = replace(record, target=replace(record.target, model_id="tiny/target"))
    report = measured(record)
    text = model_card(report, record, judged(report), manifest(record), name=NAME, licence="apache-2.0")
    data = ModelCard(text).data
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "tiny/target", "transformers")
    assert data.tags == ["speculative-decoding", "draft-model", "specdist"]
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert report.primary is not None
    assert report.speed is not None
    summary, served = report.primary.summary, report.speed.points[-1]
    assert found["mean_accepted_length"] == pytest.approx(summary.mean_accepted_length, abs=1e-4)
    assert found["acceptance_rate"] == pytest.approx(summary.acceptance_rate, abs=1e-4)
    assert found["speedup"] == pytest.approx(served.speedup, abs=1e-4), "that of the length that engines are told"
    assert data.eval_results[0].dataset_name == f"{summary.num_prompts} held-out prompts"


def test_every_number_and_the_data_are_in_it(target: Target, tmp_path: Path) -> None:
    record = draft(target, tmp_path / "export")
    report = measured(record, num_target_parameters=10 * record.num_parameters)
    decision = judged(report)
    text = model_card(report, record, decision, manifest(record), name=NAME)
    assert report.primary is not None
    for domain, summary in report.primary.domains.items():
        low, high = summary.mean_accepted_length_interval
        row = f"| {domain} | {summary.num_prompts} | {summary.mean_accepted_length:.3f} ({low:.3f} to {high:.3f})"
        assert row in text
    assert f"**Verdict: {decision.verdict}**" in text
    assert decision.reason in text
    assert "AMD EPYC 7R13, 2 cores" in text
    assert "10.0% of the target's" in text
    for known in ("299 answers to 100 prompts, 20000 tokens", "greedy, up to 96 tokens; temperature 0.7, top-k 40, "):
        assert known in text
    for digest in (record.drafter_sha256, record.target.weights_sha256, "1" * 64, "2" * 64, report.eval_prompts_sha256):
        assert digest in text


def test_what_is_unknown_is_said(target: Target, tmp_path: Path) -> None:
    record = draft(target, tmp_path / "export")
    text = model_card(measured(record, speed=None), record, None, None, name=NAME)
    data = ModelCard(text).data
    assert (data.license, data.base_model) == (UNKNOWN, None), "a directory is no model of Hugging Face's"
    assert "speedup" not in {result.metric_type for result in data.eval_results}
    for said in ("not judged", "Speed was not measured", "Where they came from is unknown", "Unknown: whoever trained"):
        assert said in text
    given = manifest(record)
    given = replace(given, inputs=replace(given.inputs, engine="given"))
    assert "**Not written by" in model_card(measured(record), record, None, given, name=NAME)


def scripts(card: str, target: Target, drafter: Path) -> list[str]:
    """The Python blocks of a card, with its two names filled in."""
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    return [block.replace("DRAFTER", str(drafter)).replace("TARGET", str(target.path)) for block in blocks]


def test_x7_the_scripts_for_a_draft_model_give_the_targets_own_tokens(target: Target, tmp_path: Path) -> None:
    record = draft(target, tmp_path / "export")
    card = model_card(measured(record), record, None, None, name=NAME)
    assert '"method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 3' in card
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1" in card
    assert "--speculative-num-draft-tokens 4" in card
    assisted, own = scripts(card, target, tmp_path / "export")
    found: dict = {}
    exec(assisted, found)
    alone = found["target"].generate(**found["inputs"], do_sample=False, max_new_tokens=64)
    assert found["output"].tolist() == alone.tolist()
    ours: dict = {}
    exec(own, ours)
    assert ours["result"].completion_ids == alone[0, found["inputs"]["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_script_for_heads_runs_and_only_engines_that_read_them_are_named(
    target: Target, tmp_path: Path, kind: str
) -> None:
    heads = make_heads(projection=OWN) if kind == "medusa" else make_heads(kind=kind)
    record = export_heads(target, tmp_path / "export", heads)
    card = model_card(measured(record), record, None, None, name=NAME)
    assert ModelCard(card).data.library_name == "specdist"
    assert ("vllm serve" in card) == (kind == "medusa")
    assert "SGLang and TensorRT-LLM have no Medusa" in card
    (script,) = scripts(card, target, tmp_path / "export")
    found: dict = {}
    exec(script, found)
    assert found["result"].completion_ids


def test_a_changed_target_is_said_first(target: Target, tmp_path: Path) -> None:
    record = replace(export_heads(target, tmp_path / "export", make_heads(projection=OWN)), lossless=False)
    quality = TargetQuality("9" * 64, "float32", 0.8, [], 1.01, [1.0, 1.02], 8, 7)
    card = model_card(measured(record, lossless=False, quality=quality), record, None, None, name=NAME)
    assert "**Not lossless**" in card.split("## Measured")[0]
    assert "7 stay the same" in card
    assert 'adapted_target(target, Path("DRAFTER") / "adapter").load_model(torch.float32)' in card
