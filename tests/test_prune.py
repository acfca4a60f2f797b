"""Layers that a pruned draft keeps: named ones, the three rules, and the measured influence of a layer."""

from itertools import pairwise

import pytest
import torch
from conftest import make_tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from specdist.drafter_config import DraftArguments
from specdist.drafters.prune import (
    block_influence,
    both_ends,
    check_layer_choice,
    choose_layers,
    evenly_spaced,
    most_influential,
    prune_layers,
)
from specdist.errors import ConfigError

TEXTS = [[5, 9, 30, 3], [17, 2, 8, 8, 21, 1]]


def test_pruning_takes_the_named_layers_and_all_the_rest() -> None:
    target = make_tiny_llama(40, layers=4)
    draft = prune_layers(target, [0, 3])
    ours, theirs = draft.state_dict(), target.state_dict()
    assert draft.config.num_hidden_layers == 2
    for name, tensor in ours.items():
        origin = name.replace("layers.1.", "layers.3.")
        assert torch.equal(tensor, theirs[origin]), name


def test_pruning_to_all_layers_is_the_target() -> None:
    target = make_tiny_llama(40, layers=3)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        assert torch.equal(prune_layers(target, [0, 1, 2]).eval()(ids).logits, target(ids).logits)


def test_a_model_of_another_build_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, n_positions=32))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no model"):
        prune_layers(model, [0])


def make_model(kind: str, layers: int, **settings: object) -> PreTrainedModel:
    common = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common | settings)).eval()


@pytest.mark.parametrize("layers", [[0, 3, 7], [3], [0, 2, 4, 6], list(range(8))])
def test_layers_without_rotary_positions_stay_without(layers: list[int]) -> None:
    target = make_model("smollm3", 8)  # of which layers 3 and 7 have none
    draft = prune_layers(target, layers)
    kept = [target.model.layers[layer].self_attn.use_rope for layer in layers]
    assert [layer.self_attn.use_rope for layer in draft.model.layers] == kept
    assert draft.config.no_rope_layers == [int(layer not in (3, 7)) for layer in layers]


QWEN_MOE = {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", QWEN_MOE | {"mlp_only_layers": [0, 2]}),
        ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 1}),
    ],
    ids=["qwen3_moe", "deepseek_v3"],
)
@pytest.mark.parametrize("layers", [[0, 1], [1, 3], [0, 3], [2, 3]])
def test_layers_of_experts_and_dense_ones_keep_their_kinds(kind: str, settings: dict, layers: list[int]) -> None:
    target = make_model(kind, 4, **settings)
    draft = prune_layers(target, layers)
    for ours, layer in zip(draft.model.layers, layers, strict=True):
        expected = target.model.layers[layer].state_dict()
        assert ours.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


def test_a_choice_of_layers_that_no_configuration_says_is_refused() -> None:
    target = make_model("qwen3_moe", 4, **QWEN_MOE, decoder_sparse_step=2)  # layers 1 and 3 have experts
    prune_layers(target, [0, 1])
    with pytest.raises(ConfigError, match="layer 1 of the target cannot be layer 0 of a qwen3_moe"):
        prune_layers(target, [1, 3])


def test_a_list_of_ids_as_long_as_the_layers_stays_whole() -> None:
    target = make_tiny_llama(40, layers=2)
    target.config.eos_token_id = [7, 9]
    assert prune_layers(target, [1]).config.eos_token_id == [7, 9]


@pytest.mark.parametrize(
    ("number", "available", "expected"),
    [
        (1, 30, [0]),
        (2, 30, [0, 29]),
        (4, 30, [0, 10, 19, 29]),
        (4, 10, [0, 3, 6, 9]),
        (3, 4, [0, 2, 3]),
        (5, 5, [0, 1, 2, 3, 4]),
    ],
)
def test_even_layers_have_equal_distances_and_both_ends(number: int, available: int, expected: list[int]) -> None:
    assert evenly_spaced(number, available) == expected


def test_even_layers_are_different_ones_at_every_size() -> None:
    for available in range(1, 40):
        for number in range(1, available + 1):
            layers = evenly_spaced(number, available)
            assert layers == sorted(set(layers))
            assert len(layers) == number
            assert 0 <= layers[0] <= layers[-1] < available
            if number > 1:
                assert (layers[0], layers[-1]) == (0, available - 1)
                gaps = {b - a for a, b in pairwise(layers)}
                assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("number", "expected"), [(1, [0]), (2, [0, 9]), (3, [0, 1, 9]), (4, [0, 1, 8, 9]), (10, list(range(10)))]
)
def test_ends_are_the_first_and_the_last(number: int, expected: list[int]) -> None:
    assert both_ends(number, 10) == expected


def test_the_most_influential_keep_their_order_and_ties_go_to_the_lower() -> None:
    assert most_influential(torch.tensor([0.1, 0.5, 0.3, 0.5, 0.3]), 3) == [1, 2, 3]


def test_influence_is_one_minus_the_cosine_of_a_layers_ends() -> None:
    model = make_tiny_llama(40, layers=3)
    expected = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor([text])
            states = list(model(ids, output_hidden_states=True).hidden_states)
            # The last of transformers' states is behind the norm: take the layer's own output
            position = torch.arange(len(text))[None]
            rotary = model.model.rotary_emb(states[0], position)
            mask = torch.full((1, 1, len(text), len(text)), -torch.inf).triu(1)
            states[3] = model.model.layers[2](states[2], attention_mask=mask, position_embeddings=rotary)
            for layer in range(3):
                expected[layer] += (1 - torch.cosine_similarity(states[layer], states[layer + 1], dim=-1)).sum()
    torch.testing.assert_close(block_influence(model, TEXTS), expected / 10, atol=1e-6, rtol=0)


def test_a_layer_that_does_nothing_has_no_influence_and_goes_first() -> None:
    model = make_tiny_llama(40, layers=3)
    idle = model.model.layers[1]
    torch.nn.init.zeros_(idle.self_attn.o_proj.weight)
    torch.nn.init.zeros_(idle.mlp.down_proj.weight)
    layers, influence = choose_layers(DraftArguments(draft_layer_rule="importance", num_draft_layers=2), model, TEXTS)
    assert layers == [0, 2]
    assert influence is not None
    assert abs(float(influence[1])) < 1e-12
    assert choose_layers(DraftArguments(draft_layer_rule="importance", num_draft_layers=2), model, TEXTS)[0] == layers


def test_importance_without_text_is_refused() -> None:
    arguments = DraftArguments(draft_layer_rule="importance", num_draft_layers=1)
    with pytest.raises(ConfigError, match="no sample text"):
        choose_layers(arguments, make_tiny_llama(40), [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no layers are chosen"),
        ({"draft_layers": [0, 0]}, "different layers, 0 to 3"),
        ({"draft_layers": [4]}, "different layers, 0 to 3"),
        ({"draft_layers": [-1]}, "different layers, 0 to 3"),
        ({"draft_layer_rule": "even", "num_draft_layers": 5}, "num_draft_layers = 5: the target has 4"),
    ],
)
def test_layers_that_the_target_lacks_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layer_choice(DraftArguments(**values), 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_layers": [0], "draft_layer_rule": "even", "num_draft_layers": 1}, "both choose"),
        ({"draft_layer_rule": "even"}, "a rule needs a number"),
        ({"num_draft_layers": 3}, "a number needs a rule"),
        ({"draft_layer_rule": "odd", "num_draft_layers": 3}, "expected one of even, ends, importance"),
        ({"lora_target_modules": ["all-linear", "q_proj"]}, "all-linear alone"),
        ({"load_in_4bit": True}, "set lora_rank as well"),
    ],
)
def test_contradictions_in_the_configuration_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftArguments(**values)
