"""A target that training changed: its model, identity, quality beside the original, and what an export holds of it."""

import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heads_factory import VOCAB, make_heads
from peft import PeftModel
from transformers import PreTrainedModel

from specdist.drafter_config import HeadsArguments
from specdist.drafters.adapted_target import adapted_target, adapters_size
from specdist.drafters.adapter import ADAPTER_WEIGHTS, add_target_adapters
from specdist.errors import ArtifactError, ConfigError
from specdist.evaluation.acceptance import EvalSet, target_pass
from specdist.evaluation.quality import answer_likelihoods, target_quality
from specdist.export.convert import convert
from specdist.export.medusa import export_medusa
from specdist.export.record import read_record
from specdist.schema import DistillRow, SamplingSpec
from specdist.stages.changed_target import starting_heads
from specdist.target import Target, open_target

ROOT = Path(__file__).resolve().parents[1]
LORA = HeadsArguments(target_lora_rank=4, target_lora_alpha=8)
TEXT = torch.tensor([[5, 9, 40, 3, 77, 12, 200]])
SAMPLED, GREEDY = SamplingSpec(0.8, top_k=20, max_new_tokens=8), SamplingSpec(max_new_tokens=8)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def write_adapter(target: Target, directory: Path, scale: float) -> Path:
    """Adapters that change the target by about `scale`."""
    model = add_target_adapters(target.load_model(torch.float32), LORA, target.identity.model_id, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=max(scale, 1e-30), generator=generator)
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def adapter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(target, tmp_path_factory.mktemp("changed") / "adapter", 0.1)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TEXT).logits


def test_the_changed_target_is_the_original_with_its_adapters(target: Target, adapter: Path) -> None:
    original = target.load_model(torch.float32)
    changed = adapted_target(target, adapter).load_model(torch.float32)
    expected = logits(PeftModel.from_pretrained(target.load_model(torch.float32), str(adapter)))
    torch.testing.assert_close(logits(changed), expected, atol=1e-4, rtol=1e-4)
    assert (logits(changed) - logits(original)).abs().max() > 0.1
    assert torch.equal(changed.lm_head.weight, original.lm_head.weight)  # what heads share with the target
    assert not any(p.requires_grad for p in changed.parameters())
    trained = add_target_adapters(original, LORA, "tiny", seed=0)
    assert adapters_size(target, LORA) == sum(p.numel() for p in trained.parameters() if p.requires_grad)


def test_its_identity_is_over_the_original_and_the_adapters(target: Target, adapter: Path, tmp_path: Path) -> None:
    other = write_adapter(target, tmp_path / "other", 0.2)
    again = shutil.copytree(adapter, tmp_path / "again")
    hashes = [adapted_target(target, path).identity.weights_sha256 for path in (adapter, other, again)]
    assert hashes[0] == hashes[2]
    assert len({*hashes, target.identity.weights_sha256}) == 3
    config = json.loads((again / "adapter_config.json").read_text())
    (again / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4}))
    assert adapted_target(target, again).identity.weights_sha256 not in hashes
    assert adapted_target(target, adapter).identity.tokenizer_sha256 == target.identity.tokenizer_sha256


def answers(model: PreTrainedModel, sampling: SamplingSpec, num: int = 6) -> EvalSet:
    """Answers that `model` wrote to random prompts, two to the first, with its states."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(num):
        ids = torch.randint(0, VOCAB, (4,), generator=generator).tolist()
        for _ in range(8):
            with torch.inference_mode():
                last = model(torch.tensor([ids])).logits[0, -1]
            best = last.topk(20).indices if sampling.top_k else last.argmax()[None]
            ids.append(int(best[torch.randint(0, len(best), (1,), generator=generator)]))
        row = DistillRow(f"row-{i}", f"prompt-{max(1, i)}", 0, 0, "code", ids[:4], ids[4:], "length", sampling, 0)
        rows.append(target_pass(model, row, sampling))
    return EvalSet(sampling, rows)


def test_the_likelihood_of_the_originals_answers_is_that_of_both_targets_logits(target: Target, adapter: Path) -> None:
    original = target.load_model(torch.float32)
    changed = adapted_target(target, adapter).load_model(torch.float32)
    sampled = answers(original, SAMPLED)
    found = answer_likelihoods(sampled, changed)
    assert [a.prompt_id for a in found] == [f"prompt-{i}" for i in range(1, 6)]
    assert [a.num_tokens for a in found] == [16, 8, 8, 8, 8]  # two answers of one prompt are one unit
    for model, field in ((original, "original_logprob"), (changed, "changed_logprob")):
        expected = dict.fromkeys((a.prompt_id for a in found), 0.0)
        for text in sampled.texts:
            ids = torch.tensor([text.row.prompt_ids + text.row.completion_ids])
            with torch.inference_mode():
                logprobs = (model(ids).logits[0, 3:-1] / 0.8).log_softmax(dim=-1)  # untruncated, at their temperature
            expected[text.row.prompt_id] += float(logprobs.gather(-1, ids[0, 4:, None]).sum())
        assert [getattr(a, field) for a in found] == pytest.approx(list(expected.values()), rel=1e-5)


def test_an_unchanged_target_loses_nothing_and_a_changed_one_something(target: Target, adapter: Path) -> None:
    original = target.load_model(torch.float32)
    texts = [answers(original, GREEDY), answers(original, SAMPLED, num=40)]
    same = target_quality(texts, texts[0], original, "0" * 64)
    assert same.perplexity_ratio == pytest.approx(1.0, abs=1e-6)
    assert (same.num_identical, same.num_greedy) == (6, 6)
    changed = adapted_target(target, adapter)
    model = changed.load_model(torch.float32)
    quality = target_quality(texts, answers(model, GREEDY), model, changed.identity.weights_sha256)
    assert quality.num_identical < 6
    low, high = quality.perplexity_ratio_interval
    assert low <= quality.perplexity_ratio <= high
    assert quality.perplexity_ratio != pytest.approx(1.0, abs=1e-3)


def export(target: Target, directory: Path, adapter: Path | None) -> None:
    projection = target.load_model(torch.float32).get_output_embeddings().weight
    settings = {"dtype": torch.float32, "num_speculative_tokens": 3, "checkpoint_step": 7}
    export_medusa(make_heads(), projection, target, directory, **settings, adapter=adapter)


@pytest.mark.parametrize("engine", [None, "tgi"])
def test_the_adapter_is_part_of_the_artefact(target: Target, adapter: Path, tmp_path: Path, engine: str | None) -> None:
    export(target, tmp_path / "plain", None)
    (adapter / ADAPTER_WEIGHTS).chmod(0o444)
    export(target, tmp_path / "export", adapter)
    made = tmp_path / "export"
    assert (made / "adapter" / ADAPTER_WEIGHTS).stat().st_mode & 0o200, "its mode is not copied"
    if engine:
        convert(made, tmp_path / "converted", engine)
        made = tmp_path / "converted"
    record, plain = read_record(made), read_record(tmp_path / "plain")
    assert (record.lossless, plain.lossless) == (False, True)
    assert f"adapter/{ADAPTER_WEIGHTS}" in record.files
    assert record.num_parameters == plain.num_parameters + adapters_size(target, LORA)
    assert "merged" in record.known_limits[0]
    assert record.target == target.identity
    # PEFT alone gives the changed target
    served = PeftModel.from_pretrained(target.load_model(torch.float32), str(made / "adapter"))
    torch.testing.assert_close(
        logits(served.merge_and_unload()), logits(adapted_target(target, adapter).load_model(torch.float32))
    )
    weights = made / "adapter" / ADAPTER_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ArtifactError, match="altered since the export"):
        read_record(made)


def test_heads_to_start_from_must_fit_and_leave_the_target(target: Target, adapter: Path, tmp_path: Path) -> None:
    export(target, tmp_path / "export", None)
    export(target, tmp_path / "lossy", adapter)
    shape = make_heads().shape
    assert starting_heads(str(tmp_path / "export"), shape, target).shape == shape
    with pytest.raises(ConfigError, match="num_layers=1"):
        starting_heads(str(tmp_path / "export"), replace(shape, num_layers=2), target)
    with pytest.raises(ConfigError, match="lossless: False"):
        starting_heads(str(tmp_path / "lossy"), shape, target)
    with pytest.raises(ConfigError, match="expected heads that leave"):
        starting_heads(str(tmp_path / "export"), shape, adapted_target(target, adapter))


def test_the_whole_chain_of_medusa_2(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export(target, tmp_path / "heads", None)
    settings = {
        "config": "recipes/configs/tiny/medusa.yaml",
        "target_model": target.path,
        "output_dir": tmp_path / "run",
        "data_dir": tmp_path / "data",
        "registry": tmp_path / "registry",
        "init_heads": tmp_path / "heads",
        "target_lora_rank": 2,
        "target_learning_rate": 0.05,
        "cache_target_states": "false",
        "medusa_num_heads": 3,
        "num_speculative_tokens": 3,
        "max_train_prompts": 16,
        "max_eval_prompts": 12,
        "max_prompt_tokens": 300,
        "train_max_new_tokens": 12,
        "eval_max_new_tokens": 8,
        "certify_prompts": 4,
        "certify_sampled_prompts": 4,
        "num_train_epochs": 1,
        "save_steps": 1,
        "speed_prompts": 0,
        "objective": "forward_kl",
    }
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPECDIST_NUM_THREADS", "1")
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", ["recipes/train_medusa.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("recipes/train_medusa.py", run_name="__main__")
    assert ended.value.code in (3, 4), caplog.text  # so few prompts cannot promote
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert not report["lossless"]
    assert [c["passed"] for c in report["certifications"]] == [True, True, True], "chain greedy, sampled, tree"
    assert report["fidelity"]["num_identical"] == report["fidelity"]["num_prompts"] == 4 + 4, "by chain, by tree"
    assert report["invalid_reasons"] == []
    assert report["target"]["weights_sha256"] == target.identity.weights_sha256
    changed = adapted_target(target, tmp_path / "run" / "export" / "adapter").identity.weights_sha256
    quality = report["quality"]
    assert quality["weights_sha256"] == changed
    assert quality["num_identical"] < quality["num_greedy"] == 10  # two prompts are too long
    assert (tmp_path / "run" / "report.html").read_text().count("This drafter changes the target") == 1
    gate = json.loads((tmp_path / "run" / "gate.json").read_text())
    (check,) = [c for c in gate["checks"] if c["name"] == "task_quality"]
    assert not check["passed"]
    # acceptance is replayed on what the changed target wrote, not on the original's texts
    written = [json.loads(m.read_text()) for m in (tmp_path / "run" / "texts" / "export").glob("*/manifest.json")]
    assert [m["inputs"]["target"]["weights_sha256"] for m in written] == [changed] * 2
    assert [p.name for p in (tmp_path / "run" / "texts").iterdir()] == ["export"]
