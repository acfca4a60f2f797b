"""The target's stored states: which state belongs to which token, whole shards only, and a check that they suffice."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from draft_factory import examples
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from specdist.dataset import features
from specdist.dataset.features import target_states
from specdist.errors import ArtifactError

ROWS = [(4, 9), (11, 3), (2, 20), (7, 1), (5, 5)]


def states_of(rows: Dataset, directory: Path, model: LlamaForCausalLM) -> features.TargetStates:
    return target_states(directory, rows, lambda: model, hidden_size=32)


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


class ScaledLater(LlamaForCausalLM):
    """Its output projection reads what its last_hidden_state is not yet: a scale, as of a norm, comes in between."""

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        hidden = self.base_model(input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden * torch.linspace(-3, 3, 32)))


def test_t11_states_that_do_not_give_the_targets_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not give its own choices"):
        states_of(examples(ROWS), tmp_path / "states", ScaledLater(make_tiny_llama(268).config))
    assert not list(tmp_path.glob("states/*.safetensors"))


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

    assert target_states(tmp_path / "states", rows, must_not_load, hidden_size=32).of(3).shape == (1, 32)


def test_too_little_disk_is_an_error_before_work(
    tmp_path: Path, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(ArtifactError, match=r"states need .* GB"):
        states_of(examples(ROWS), tmp_path / "states", tiny_model)
