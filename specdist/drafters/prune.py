"""Owns cutting a draft model out of its target: which decoder layers are kept, by which rule, and the copy itself.

Shapes: L decoder layers of the target, T tokens, D hidden size.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdist.drafter_config import DraftArguments
from specdist.errors import ConfigError

_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")  # lists of layers by number; other lists have an entry for each one


def check_layers(layers: Sequence[int], available: int) -> None:
    """Raise ConfigError unless `layers` are one or more different ones of 0 to `available` − 1."""
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer < available for layer in layers):
        raise ConfigError(f"draft_layers {list(layers)}: expected one or more different layers, 0 to {available - 1}")


def evenly_spaced(number: int, available: int) -> list[int]:
    """`number` of `available` layers at equal distances, the first and the last among them (one: the first)."""
    if number == 1:
        return [0]
    return [(i * (available - 1) + (number - 1) // 2) // (number - 1) for i in range(number)]


def both_ends(number: int, available: int) -> list[int]:
    """The first ⌈number/2⌉ and the last ⌊number/2⌋ of `available` layers."""
    first = math.ceil(number / 2)
    return [*range(first), *range(available - (number - first), available)]


def most_influential(influence: Tensor, number: int) -> list[int]:
    """The `number` layers of the largest `influence` [L], in the target's order; of equal ones the lower."""
    return sorted(torch.argsort(influence, descending=True, stable=True)[:number].tolist())


def check_layer_choice(arguments: DraftArguments, available: int) -> int:
    """The number of layers that `arguments` will keep of `available`. Raises ConfigError where that cannot be done."""
    if arguments.draft_layers:
        check_layers(arguments.draft_layers, available)
        return len(arguments.draft_layers)
    if not arguments.draft_layer_rule:
        raise ConfigError(
            "init prune: no layers are chosen; give draft_layers (for example [0, 1, 2, 3]), or draft_layer_rule "
            "(even, ends or importance) with num_draft_layers"
        )
    if arguments.num_draft_layers > available:
        raise ConfigError(
            f"num_draft_layers = {arguments.num_draft_layers}: the target has {available} layers; lower it"
        )
    return arguments.num_draft_layers


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `model`. Raises ConfigError where they are not in `model.layers`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"init prune: {type(model).__name__} has no model.layers; pruning knows models whose decoder layers are "
            "model.layers.N: name a draft model instead (--init)"
        )
    return layers


def _add_cosines(
    sums: Tensor, index: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
) -> None:
    before = inputs[0] if inputs else named["hidden_states"]  # [1, T, D]
    after = output[0] if isinstance(output, tuple) else output
    sums[index] += torch.cosine_similarity(before.double(), after.double(), dim=-1).sum().cpu()


@torch.inference_mode()
def block_influence(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """How much each layer changes its input: 1 − mean over all tokens of cos(hidden before, hidden after). [L], fp64.

    `texts` are token ids, fed one at a time. Block Influence of "ShortGPT" (Men et al. 2024, eq. 1). Raises
    ConfigError where there is no token, or where the layers are not in `model.layers`.
    """
    layers, num_tokens = decoder_layers(model), sum(len(text) for text in texts)
    if not num_tokens:
        raise ConfigError("draft_layer_rule importance: no sample text to measure on; expected training examples")
    sums = torch.zeros(len(layers), dtype=torch.float64)
    hooks = [
        layer.register_forward_hook(partial(_add_cosines, sums, index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        for text in texts:
            model(input_ids=torch.tensor([list(text)], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return 1.0 - sums / num_tokens


def planned_layers(arguments: DraftArguments, available: int) -> list[int]:
    """The layers that `arguments` keep of `available`; for the rule importance, which measures them, the first ones.

    Raises as `check_layer_choice`.
    """
    number = check_layer_choice(arguments, available)
    if arguments.draft_layers:
        return list(arguments.draft_layers)
    if arguments.draft_layer_rule == "importance":
        return list(range(number))
    rule = evenly_spaced if arguments.draft_layer_rule == "even" else both_ends
    return rule(number, available)


def choose_layers(
    arguments: DraftArguments, target: PreTrainedModel, texts: Sequence[Sequence[int]]
) -> tuple[list[int], Tensor | None]:
    """The layers to keep by `draft_layers` or `draft_layer_rule`, and the influence [L] where that was measured.

    `texts` (token ids) serve the rule importance alone. Raises ConfigError as `check_layer_choice`.
    """
    layers = planned_layers(arguments, target.config.get_text_config().num_hidden_layers)
    if arguments.draft_layers or arguments.draft_layer_rule != "importance":
        return layers, None
    influence = block_influence(target, texts)
    return most_influential(influence, len(layers)), influence


def pruned_config(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The configuration of a model that keeps `layers` of the one that `config` describes."""
    pruned = copy.deepcopy(config)
    pruned.num_hidden_layers = len(layers)
    for name, value in vars(config).items():
        if name in _LAYER_NUMBERS and value:
            setattr(pruned, name, [i for i, layer in enumerate(layers) if layer in value])
        elif isinstance(value, list | tuple) and len(value) == config.num_hidden_layers and "token_id" not in name:
            setattr(pruned, name, [value[layer] for layer in layers])
    if dense := getattr(config, "first_k_dense_replace", None):
        pruned.first_k_dense_replace = sum(layer < dense for layer in layers)
    return pruned


def _traits(layer: nn.Module) -> dict[str, Any]:
    """What a decoder layer is, apart from its weights and its number: kinds of modules, their settings and shapes."""
    traits: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    for path, module in layer.named_modules():
        traits[path] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and not name.startswith(("_", "layer_", "training")):
                traits[f"{path}.{name}"] = value
    return traits


def _check_same_layers(draft: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise ConfigError where a layer of the draft would be built in another way than the target's it stands for."""
    for i, layer in enumerate(layers):
        ours, theirs = _traits(decoder_layers(draft)[i]), _traits(decoder_layers(target)[layer])
        if wrong := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
            raise ConfigError(
                f"init prune: layer {layer} of the target cannot be layer {i} of a {target.config.model_type}, which "
                f"builds that one in another way ({wrong[:3]}); choose draft_layers that keep the order of the kinds "
                "of layers, such as the first ones"
            )


def prune_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A draft model from the target's own embeddings, norm, output projection and the named decoder layers, in order.

    Raises ConfigError on an index that the target lacks, on a model whose layers are not in `model.layers`, and where
    such a model would build a layer at its new place in another way.
    """
    check_layers(layers, target.config.get_text_config().num_hidden_layers)
    decoder_layers(target)
    draft = AutoModelForCausalLM.from_config(pruned_config(target.config, layers), dtype=target.dtype)
    _check_same_layers(draft, target, layers)
    origin = {f"model.layers.{i}.": f"model.layers.{layer}." for i, layer in enumerate(layers)}
    source = target.state_dict()
    state = {}
    for name in draft.state_dict():
        prefix = ".".join(name.split(".")[:3]) + "."
        state[name] = source[origin[prefix] + name.removeprefix(prefix) if prefix in origin else name]
    draft.load_state_dict(state)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft
