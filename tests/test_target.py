"""Opening a target: found or refused before anything is loaded, named by its content, stopped by every EOS id."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import GenerationConfig

from specdist.errors import ArtifactError, ConfigError
from specdist.target import chain_inputs, forward_block, new_cache, open_target, stop_token_ids


def test_no_such_target_is_refused_with_what_to_do() -> None:
    with pytest.raises(ArtifactError, match=r"no-such/model.*check the spelling"):
        open_target("no-such/model")


def test_a_directory_without_weights_or_without_a_template_is_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ArtifactError, match="not a Hugging Face causal LM"):
        open_target(str(empty))
    plain = tmp_path / "plain"
    shutil.copytree(tiny_target_dir, plain)
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        open_target(str(plain))


def test_identity_is_content_and_not_place(tmp_path: Path, tiny_target_dir: Path) -> None:
    moved = tmp_path / tiny_target_dir.name
    shutil.copytree(tiny_target_dir, moved)
    assert open_target(str(moved)).identity == open_target(str(tiny_target_dir)).identity
    make_tiny_llama(268, seed=9).save_pretrained(moved)
    assert open_target(str(moved)).identity.weights_sha256 != open_target(str(tiny_target_dir)).identity.weights_sha256


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(5, [5, 3], [3, 5, 258 + 9]), (None, None, [267]), ([1, 2], 4, [1, 2, 4, 267])],
)
def test_e2_the_stop_set_is_the_union(config_eos, generation_eos, expected: list[int]) -> None:
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_llama(268)
    model.config.eos_token_id = config_eos
    assert tokenizer.eos_token_id == 267
    found = stop_token_ids(model.config, GenerationConfig(eos_token_id=generation_eos), tokenizer)
    assert found == expected


def test_m12_a_token_beyond_the_embeddings_is_named(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    make_tiny_llama(268).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\[PAD\].*268 embedding rows"):
        open_target(str(tmp_path))


def test_t11_hidden_states_are_what_the_output_projection_reads() -> None:
    model = make_tiny_llama(40)
    with torch.inference_mode():
        hidden, logits = forward_block(model, list(range(12)), new_cache(model))
        torch.testing.assert_close(model.get_output_embeddings()(hidden), logits)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_e5_mask_and_positions_of_ones_own_do_not_change_a_pass(num_tokens: int) -> None:
    model, ids = make_tiny_llama(64).bfloat16(), [(7 * i + 3) % 64 for i in range(20)]
    with torch.inference_mode():
        passes = []
        for own in (True, False):
            cache = new_cache(model)
            forward_block(model, ids, cache)
            fresh = torch.tensor([ids[:num_tokens]])
            given = chain_inputs(model, cache, num_tokens) if own else {}
            assert bool(given) == own
            passes.append(model(input_ids=fresh, cache=cache, use_cache=True, **given).logits.float())
    torch.testing.assert_close(*passes, rtol=0.05, atol=0.05)
    assert chain_inputs(model.float(), cache, 1) == {}, "in fp32 nothing is gained"
    assert chain_inputs(model.bfloat16(), new_cache(model), 1) == {}, "a prompt has no past"
