"""The target's stored states: which state belongs to which token, whole shards only, and a check that they suffice."""

from pathlib import Path
from types import SimpleNamespace as NS

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from draft_factory import examples
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from specdist.dataset import features
from specdist.dataset.features import target_states
from specdist.errors import ArtifactError, ConfigError
from specdist.target import output_projection

ROWS = [(4, 9), (11, 3), (2, 20), (7, 1), (5, 5)]


def states_of(rows: Dataset, directory: Path, model: LlamaForCausalLM) -> features.TargetStates:
    return target_states(directory, rows, lambda: model)


def test_t11_a_state_is_after_the_norm_and_produced_its_token(tmp_path: Path, tiny_model: LlamaForCausalLM) -> None:
    rows = examples(ROWS)
    states = states_of(rows, tmp_path / "states", tiny_model)
    for i, row in enumerate(rows):
        with torch.inference_mode():
            output = tiny_model(torch.tensor([row["input_ids"]]), output_hidden_states=True)
        positions = slice(row["prompt_length"] - 1, len(row["input_ids"]) - 1)
        assert states.of(i).shape == (len(row["input_ids"]) - row["prompt_length"], 32)
        torch.testing.assert_close(states.of(i), output.hidden_states[-1][0, positions], atol=1e-5, rtol=1e-5)
        assert torch.equal(tiny_model.lm_head(states.of(i)).argmax(-1), output.logits[0, positions].argmax(-1))


class NormedLater(LlamaForCausalLM):
    """Its output projection reads what its last_hidden_state is not yet: a scale, as of a norm, comes in between."""

    scale = torch.linspace(-3, 3, 32)

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        hidden = self.base_model(input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden * self.scale.to(hidden.dtype)))


class Sharper(NormedLater):
    """The same choices as its states give, at another temperature."""

    scale = torch.tensor(1.25)


@pytest.mark.parametrize("kind", [NormedLater, Sharper])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t11_states_that_do_not_give_the_targets_logits_are_refused(
    tmp_path: Path, kind: type[LlamaForCausalLM], dtype: torch.dtype
) -> None:
    with pytest.raises(ConfigError, match="not what its output projection makes of its states: they differ by"):
        states_of(examples(ROWS), tmp_path / "states", kind(make_tiny_llama(268).config).to(dtype))
    assert not list(tmp_path.glob("states/*.safetensors"))


def test_t11_a_soft_cap_in_bfloat16_may_make_ties(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 268, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Gemma2Config(**small, final_logit_softcapping=30.0, tie_word_embeddings=False)
    model = Gemma2ForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(std=8.0)
    rows = examples(ROWS)
    states = states_of(rows, tmp_path / "states", model.bfloat16())
    ids = torch.tensor([rows[2]["input_ids"]])
    with torch.inference_mode():
        own = model(ids, use_cache=False).logits[0, 1:-1]
        ours = output_projection(model, config).of(states.of(2))
    assert not torch.equal(ours.argmax(-1), own.argmax(-1)), "no ties: this shows nothing"
    torch.testing.assert_close(ours, own.float(), rtol=0.02, atol=0.02)


def test_a_killed_run_keeps_its_shards(
    tmp_path: Path, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_POSITIONS", 12)
    rows = examples(ROWS)
    whole = states_of(rows, tmp_path / "whole", tiny_model)
    assert whole.first_examples == [0, 2, 3]  # 9 + 3 positions, 20, 1 + 5
    parts = states_of(rows, tmp_path / "parts", tiny_model)
    (tmp_path / "parts" / "00001.safetensors").unlink()
    (tmp_path / "parts" / ".00001.safetensors.tmp").write_bytes(b"half")
    kept = (tmp_path / "parts" / "00000.safetensors").stat().st_mtime_ns
    states_of(rows, tmp_path / "parts", tiny_model)
    assert (tmp_path / "parts" / "00000.safetensors").stat().st_mtime_ns == kept
    for i in range(len(rows)):
        assert torch.equal(parts.of(i), whole.of(i))


def test_finished_states_need_no_target(tmp_path: Path, tiny_model: LlamaForCausalLM) -> None:
    rows = examples(ROWS)
    states_of(rows, tmp_path / "states", tiny_model)

    def must_not_load() -> LlamaForCausalLM:
        raise AssertionError("the target was loaded")

    assert target_states(tmp_path / "states", rows, must_not_load).of(3).shape == (1, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_disk_needs_room_for_the_missing_states_alone(
    tmp_path: Path, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(features, "SHARD_POSITIONS", 12)
    rows, directory, model = examples(ROWS), tmp_path / "states", tiny_model.to(dtype)
    states_of(rows, directory, model)
    second = directory / "00001.safetensors"
    second.unlink()
    needed = 20 * 32 * dtype.itemsize  # positions, hidden size
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: NS(free=needed - 1))
    with pytest.raises(ArtifactError, match=r"states need .* GB more"):
        states_of(rows, directory, model)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: NS(free=needed))
    states_of(rows, directory, model)
    assert second.exists()
