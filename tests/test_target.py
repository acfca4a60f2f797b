"""Opening a target: found or refused before anything is loaded, named by its content, stopped by every EOS id."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.errors import ArtifactError, ConfigError
from specdist.target import (
    chain_inputs,
    check_projection,
    check_tree_decoding,
    empty_cache,
    forward_block,
    keep_fed,
    new_cache,
    open_target,
    output_projection,
    stop_token_ids,
)

COMMON = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
KINDS: dict[str, dict] = {
    "mamba": {}, "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1}, "rwkv": {}, "minimax": LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "lm_head_multiplier": 0.25},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]}, "qwen3_next": LINEAR, "qwen3_5_text": LINEAR,
    "recurrent_gemma": {"lru_width": 16, "block_types": ["recurrent", "attention"], "logits_soft_cap": 3.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "cohere": {"logit_scale": 0.5}, "granite": {"logits_scaling": 4.0}, "gemma2": {"final_logit_softcapping": 3.0},
    "llama4_text": {"intermediate_size_mlp": 16, "num_local_experts": 2},
}  # fmt: skip


def make_config(kind: str) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **COMMON | KINDS[kind])


def make_model(kind: str) -> PreTrainedModel:
    """A random fp32 model of a kind, whose logits are no near-ties."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config(kind)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
    return model


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


@pytest.mark.parametrize("kind", ["llama4_text", "opt", "gemma2"])
def test_t11_states_of_the_last_layer_alone_are_kept_for_every_build(kind: str) -> None:
    model, ids = make_model(kind), list(range(3, 12))
    with torch.inference_mode():
        hidden, logits = forward_block(model, ids, None, logits_to_keep=2)
        every = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    assert torch.equal(hidden, every.hidden_states[-1][0])
    torch.testing.assert_close(logits, every.logits[0, -2:])


@pytest.mark.parametrize("kind", ["falcon_h1", "recurrent_gemma", "cohere", "granite", "gemma2", "llama4_text"])
def test_t11_the_output_projection_gives_the_models_own_logits(kind: str) -> None:
    model = make_model(kind)
    with torch.inference_mode():
        hidden, logits = forward_block(model, list(range(9)), None)
        torch.testing.assert_close(output_projection(model, model.config).of(hidden), logits)
    check_projection(model)
    check_projection(model.bfloat16())


def test_t11_a_model_whose_logits_are_made_in_another_way_is_refused() -> None:
    model = make_tiny_llama(40)
    model.lm_head.register_forward_hook(lambda module, given, logits: 0.5 * logits)
    with pytest.raises(ConfigError, match=r"llama: its logits are not .* differ by 100\.0%"):
        check_projection(model)


@pytest.mark.parametrize(
    "kind",
    [
        "mamba", "mamba2", "rwkv", "minimax", "jamba", "bamba", "falcon_h1", "granitemoehybrid", "qwen3_next",
        "qwen3_5_text", "recurrent_gemma",
    ],
)  # fmt: skip
def test_e5_a_model_from_whose_state_no_token_can_be_taken_back_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind}: speculative decoding would not be lossless"):
        empty_cache(make_config(kind))


def test_e5_it_is_refused_when_it_is_opened_and_as_a_draft(tmp_path: Path) -> None:
    model = make_model("qwen3_5_text")
    with pytest.raises(ConfigError, match="recurrent state"):
        DraftModelDrafter(model, 48)
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="recurrent state"):
        open_target(str(tmp_path))


@pytest.mark.parametrize("kind", ["lfm2", "llama4_text"])  # convolutions, chunks of attention
def test_e5_after_tokens_were_taken_back_a_pass_is_as_if_they_had_never_been(kind: str) -> None:
    model, ids = make_model(kind), [(7 * i + 3) % 48 for i in range(14)]
    with torch.inference_mode():
        cache = new_cache(model)
        forward_block(model, ids[:8], cache)
        forward_block(model, [ids[8], 5, 6, 7], cache)
        keep_fed(cache, 3, [])
        _, logits = forward_block(model, ids[9:], cache)
        torch.testing.assert_close(logits, forward_block(model, ids, None)[1][9:], atol=1e-4, rtol=1e-4)


def test_a_draft_tree_on_alibi_is_refused() -> None:
    shape = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = FalconForCausalLM(FalconConfig(**shape, alibi=True))
    with pytest.raises(ConfigError, match="FalconForCausalLM: ALiBi"):
        check_tree_decoding(model, new_cache(model))


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
