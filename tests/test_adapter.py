"""LoRA on a draft model: only adapters learn and are saved, a merge is checked, a wrong base is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from trl import SFTConfig

from specdist.drafter_config import DraftArguments
from specdist.drafters.adapter import (
    ADAPTER_BASE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PARITY,
    add_adapters,
    check_adapters,
    load_adapter,
    merge_adapter,
)
from specdist.drafters.causal_lm import load_draft_model, load_for_drafting, trainable_draft
from specdist.errors import ArtifactError, ConfigError
from specdist.export.draft_model import export_draft_model
from specdist.losses import Objective
from specdist.target import Target, open_target
from specdist.training.batches import DraftCollator
from specdist.training.callbacks import CheckpointAcceptance, run_training
from specdist.training.draft import draft_trainer

LORA = DraftArguments(draft_layers=[0, 1], lora_rank=4, lora_alpha=16)
TEXT = torch.tensor([[5, 9, 40, 3, 77, 12, 200]])


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


@pytest.fixture
def init(tmp_path: Path) -> Path:
    make_tiny_llama(268, seed=9).save_pretrained(tmp_path / "init")
    return tmp_path / "init"


def examples() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (12,), generator=generator).tolist() for _ in range(8)]
    return Dataset.from_list([{"input_ids": r, "labels": [-100] * 3 + r[3:], "prompt_length": 3} for r in rows])


def make_trainer(init: Path, directory: Path, arguments: DraftArguments = LORA, *, steps: int = 4, **extra):
    settings = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
    }
    model = trainable_draft(init, arguments, "cpu", seed=5)
    return draft_trainer(
        model,
        make_tiny_tokenizer(),
        DraftCollator(examples(), 0),
        SFTConfig(**{**settings, **extra}),
        num_tokens=268,
        objective=Objective({"cross_entropy": 1.0}),
    )


def train(trainer, resume_from: Path | None = None) -> None:
    run_training(trainer, resume_from=resume_from, callbacks=[CheckpointAcceptance(lambda _: {}, dict)])


def adapter_logits(init: Path, checkpoint: Path) -> torch.Tensor:
    """The adapters' own logits, by PEFT alone."""
    model = PeftModel.from_pretrained(load_draft_model(init, torch.float32), str(checkpoint)).eval()
    with torch.inference_mode():
        return model(TEXT).logits


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_adapters_learn(init: Path, tmp_path: Path, rank: int, checkpointing: bool) -> None:
    arguments = DraftArguments(draft_layers=[0], lora_rank=rank)
    trainer = make_trainer(
        init, tmp_path / "run", arguments, save_strategy="no", activation_checkpointing=checkpointing
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    train(trainer)
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    if rank:
        assert changed == {name for name in before if ".lora_" in name}
        assert len(changed) == 2 * 7 * 2  # A and B at the seven products of two layers
    else:
        assert "lm_head.weight" in changed
    assert trainer.model.get_output_embeddings().weight.shape == (268, 32)


def test_an_adapter_checkpoint_holds_no_tensor_of_the_base(init: Path, tmp_path: Path) -> None:
    train(make_trainer(init, tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    names = {p.name for p in checkpoint.iterdir()}
    assert names >= {ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_BASE}
    assert [n for n in names if n.endswith(".safetensors")] == [ADAPTER_WEIGHTS]
    assert sum(p.stat().st_size for p in checkpoint.iterdir()) < (init / "model.safetensors").stat().st_size
    tensors = load_file(checkpoint / ADAPTER_WEIGHTS)
    assert all(".lora_A." in name or ".lora_B." in name for name in tensors)
    assert len(tensors) == 28
    assert json.loads((checkpoint / ADAPTER_BASE).read_text())["vocab_size"] == 268
    for file in checkpoint.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file


def test_the_base_is_not_changed_by_fresh_adapters_and_their_values_come_from_the_seed(init: Path) -> None:
    base = load_draft_model(init, torch.float32)
    with torch.inference_mode():
        expected = base(TEXT).logits
        first, second = (trainable_draft(init, LORA, "cpu", seed=5) for _ in range(2))
        torch.randn(3)
        assert torch.equal(first.eval()(TEXT).logits, expected)
    other = trainable_draft(init, LORA, "cpu", seed=6)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert any(not torch.equal(t, other.state_dict()[n]) for n, t in first.state_dict().items())


def test_a_resumed_run_ends_as_an_uninterrupted_one(init: Path, tmp_path: Path) -> None:
    whole = make_trainer(init, tmp_path / "whole")
    train(whole)
    train(make_trainer(init, tmp_path / "cut", steps=2))
    resumed = make_trainer(init, tmp_path / "cut")
    train(resumed, tmp_path / "cut" / "checkpoint-2")
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, atol=1e-7, rtol=1e-6)


def test_the_merged_export_has_the_logits_of_the_adapters(target: Target, init: Path, tmp_path: Path) -> None:
    train(make_trainer(init, tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    expected = adapter_logits(init, checkpoint)
    merged = load_draft_model(checkpoint, torch.float32, base=init)
    export_draft_model(
        merged, target, tmp_path / "export", dtype=torch.float32, num_speculative_tokens=2, checkpoint_step=4
    )
    # Without the initial draft: an export stands alone
    shutil.rmtree(init)
    model, vocabulary = load_for_drafting(tmp_path / "export", target, torch.float32)
    assert len(vocabulary) == 268
    with torch.inference_mode():
        assert float((model(TEXT).logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert not list((tmp_path / "export").glob("adapter*"))


def test_a_merge_that_loses_the_adapters_is_refused(init: Path, tmp_path: Path) -> None:
    train(make_trainer(init, tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    with pytest.raises(ArtifactError, match=r"the merged model's logits differ by .* Merge in float32"):
        merge_adapter(load_adapter(load_draft_model(init, torch.bfloat16), checkpoint))
    half = load_draft_model(checkpoint, torch.bfloat16, base=init)  # merged in float32, then rounded
    assert half.dtype == torch.bfloat16
    merged = merge_adapter(load_adapter(load_draft_model(init, torch.float32), checkpoint))
    with torch.inference_mode():
        expected = adapter_logits(init, checkpoint)
        assert float((merged(TEXT).logits - expected).abs().max()) <= PARITY * float(expected.abs().max())


def test_a_merge_of_what_is_not_a_number_is_refused(init: Path) -> None:
    model = add_adapters(load_draft_model(init, torch.float32), LORA, seed=0).eval()
    weights = next(p for name, p in model.named_parameters() if ".lora_B." in name)
    torch.nn.init.constant_(weights, torch.nan)
    with pytest.raises(ArtifactError, match="differ by nan"):
        merge_adapter(model)


def test_c12_an_adapter_of_a_resized_vocabulary_is_refused_by_both_sizes(tmp_path: Path) -> None:
    make_tiny_llama(100).save_pretrained(tmp_path / "base")
    resized = load_draft_model(tmp_path / "base", torch.float32)
    resized.resize_token_embeddings(104, mean_resizing=False)
    adapter = add_adapters(resized, LORA, seed=0)
    adapter.save_pretrained(str(tmp_path / "adapter"))
    assert json.loads((tmp_path / "adapter" / ADAPTER_BASE).read_text())["vocab_size"] == 104
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS))
    with pytest.raises(ArtifactError, match=r"104 vocabulary rows, this one has 100; resize .*embeddings\(104\)"):
        load_draft_model(tmp_path / "adapter", torch.float32, base=tmp_path / "base")
    fits = load_draft_model(tmp_path / "base", torch.float32)
    fits.resize_token_embeddings(104, mean_resizing=False)
    load_adapter(fits, tmp_path / "adapter")


def test_adapters_without_their_base_are_refused(init: Path, tmp_path: Path) -> None:
    trainable_draft(init, LORA, "cpu").save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ArtifactError, match="holds adapters only"):
        load_draft_model(tmp_path / "adapter", torch.float32)


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "cut"])
def test_adapters_that_are_not_whole_are_refused(init: Path, tmp_path: Path, change: str) -> None:
    trainable_draft(init, LORA, "cpu").save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["base_model.model.lm_head.weight"] = torch.zeros(268, 32)
    elif change == "shape":
        tensors[name] = tensors[name][:1].clone()
    if change == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        save_file(tensors, file)
    with pytest.raises(ArtifactError, match=ADAPTER_WEIGHTS):
        load_draft_model(tmp_path / "adapter", torch.float32, base=init)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["q_prj"], r"no 'q_prj'; expected all-linear or of \['down_proj'"),
        (["q_proj", "lm_head"], "'lm_head' is the embeddings or the output projection"),
        (["embed_tokens"], "'embed_tokens' is the embeddings or the output projection"),
    ],
)
def test_modules_that_cannot_carry_adapters_are_refused(modules: list[str], message: str) -> None:
    arguments = DraftArguments(draft_layers=[0], lora_rank=2, lora_target_modules=modules)
    with pytest.raises(ConfigError, match=message):
        check_adapters(make_tiny_llama(40), arguments)


def test_named_modules_alone_get_adapters(init: Path) -> None:
    arguments = DraftArguments(draft_layers=[0], lora_rank=2, lora_target_modules=["q_proj", "mlp.up_proj"])
    model = trainable_draft(init, arguments, "cpu")
    carriers = {name.split(".lora_")[0].split(".")[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert carriers == {"q_proj", "up_proj"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have what it needs")
def test_four_bits_without_a_gpu_are_refused_before_work(init: Path) -> None:
    arguments = DraftArguments(draft_layers=[0], lora_rank=2, load_in_4bit=True)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        check_adapters(make_tiny_llama(40), arguments)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        trainable_draft(init, arguments, "cpu")
