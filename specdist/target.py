"""Owns the target model: finding it, naming it by its hashes, loading it frozen, and running it over a block of tokens.

Shapes: T tokens, D hidden size, V vocabulary. Knows no drafter.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from specdist import provenance
from specdist.errors import ArtifactError, ConfigError
from specdist.losses import Projection
from specdist.schema import TargetIdentity
from specdist.weights import causal_lm_class, check_weights, load_causal_lm

logger = logging.getLogger(__name__)

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Target:
    """A target that was found and checked; its weights are loaded on demand."""

    path: Path
    identity: TargetIdentity
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig

    @property
    def context_length(self) -> int | None:
        """Longest text in tokens, or None where the configuration does not say."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def load_model(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", device_map: str | None = None
    ) -> PreTrainedModel:
        """The target in evaluation mode, without gradients, on `device` or spread as accelerate's `device_map` says.

        Raises ArtifactError as `load_causal_lm`, ConfigError as `check_projection`.
        """
        model = load_causal_lm(self.path, dtype, device_map=device_map or {"": device}).requires_grad_(False)
        check_projection(model)
        return model


def locate_target(model: str) -> Path:
    """Directory of a target given as the demo's name, a directory, or a Hugging Face id (fetched into its cache).

    Raises ArtifactError where there is no such model.
    """
    from specdist import demo

    if model == demo.DEMO_NAME:
        return demo.demo_target()
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"target_model {model!r}: no such directory, and it cannot be fetched as a Hugging Face id "
            f"({type(error).__name__}); check the spelling and the network, "
            f"or give a directory, or {demo.DEMO_NAME!r} for the demo"
        ) from error


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, found as `locate_target` does. Raises ArtifactError where there is none."""
    path = locate_target(model)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{model}: no tokenizer can be read from it ({error})") from error


def stop_token_ids(
    config: PretrainedConfig, generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Every id that ends a text: the union over configuration, generation configuration and tokenizer, sorted.

    Raises ConfigError where there is none.
    """
    found: set[int] = set()
    for value in (config.get_text_config().eos_token_id, generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update([value] if isinstance(value, int) else value or [])
    if not found:
        raise ConfigError("the target names no eos_token_id in config, generation_config or tokenizer: add one")
    return sorted(found)


def _weights_sha256(path: Path) -> str:
    files = sorted(path.glob("*.safetensors"))
    if sum(f.stat().st_size for f in files) > 20e9:
        logger.info("hashing the target's weights, about a minute per 50 GB")
    return provenance.sha256_json({f.name: provenance.sha256_file(f) for f in files})


def open_target(model: str, *, chat: bool = True) -> Target:
    """Find a target, read its configuration and tokenizer and hash what identifies it. Loads no weights.

    `chat`: conversations will be rendered for it. Raises ArtifactError where it is missing, unreadable or cut,
    ConfigError where it has no EOS, or no chat template for `chat`, and where drafts could not be taken back from its
    cache.
    """
    path = locate_target(model)
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"target_model {model}: not a Hugging Face causal LM directory ({error})") from error
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"target_model {model}: its tokenizer has no chat template, so prompts cannot be rendered")
    empty_cache(config)  # refuses what could not decode
    check_weights(path, config)
    generation_config = (
        GenerationConfig.from_pretrained(path) if (path / "generation_config.json").exists() else GenerationConfig()
    )
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    identity = TargetIdentity(
        model_id=model if not Path(model).is_dir() else Path(model).name,
        weights_sha256=_weights_sha256(path),
        tokenizer_sha256=provenance.sha256_json({"vocab": tokenizer.get_vocab(), "special": special}),
        chat_template_sha256=provenance.sha256_json(tokenizer.chat_template),
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=stop_token_ids(config, generation_config, tokenizer),
    )
    if len(tokenizer) > identity.vocab_size:
        last = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
        raise ConfigError(
            f"target_model {model}: token {last!r} has id {len(tokenizer) - 1}, but the model has only "
            f"{identity.vocab_size} embedding rows; resize the target first, it is never changed silently"
        )
    return Target(path, identity, tokenizer, config)


@lru_cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of what a model's `forward` takes: kept, since they are asked for in every pass."""
    return frozenset(inspect.signature(forward).parameters)


def cache_argument(model: PreTrainedModel) -> str:
    """What `forward` calls the KV cache: transformers before 5.20, as vLLM pins it, says past_key_values."""
    return "cache" if "cache" in _arguments(type(model).forward) else "past_key_values"


def empty_cache(config: PretrainedConfig) -> DynamicCache:
    """An empty KV cache of such a model, from which tokens can be taken back, sliding-window layers included.

    Raises ConfigError where they cannot, as rejected drafts must be: the state of a convolution can be cut back, a
    recurrent one (Mamba, linear attention) is a sum over all tokens.
    """
    cache, kind = DynamicCache(config=config), causal_lm_class(config)
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""] * len(cache.layers)
    layers = zip(kinds, cache.layers, strict=False)
    fault = ""
    if any(hasattr(layer, "update_recurrent_state") and layer_type != "conv" for layer_type, layer in layers):
        fault = "layers with a recurrent state, from which rejected drafts cannot be taken back"
    elif kind is not None and not {"cache", "past_key_values"} & _arguments(kind.forward):
        fault = "no key-value cache in its forward"
    if fault:
        raise ConfigError(
            f"{config.model_type}: speculative decoding would not be lossless with {fault}; take a model with attention"
        )
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    return cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """`empty_cache` of a model."""
    return empty_cache(model.config)


def check_tree_decoding(model: PreTrainedModel, cache: DynamicCache) -> None:
    """Raise ConfigError where a block cannot be a tree, since `forward_block` or `keep_fed` lacks what it needs."""
    attention = model.config._attn_implementation
    layers = {type(layer).__name__ for layer in cache.layers} - {DynamicLayer.__name__}
    if layers:
        fault = f"cache layers {sorted(layers)}, expected full attention in every layer"
    elif attention not in ("sdpa", "eager"):
        fault = f"attention {attention}, which takes no mask of one's own; load it with sdpa or eager"
    elif getattr(model.config.get_text_config(), "alibi", False):
        fault = "ALiBi, which makes its positions of the mask"
    elif "position_ids" not in _arguments(type(model).forward):
        fault = "no position_ids in its forward, so two tokens cannot stand at one position"
    else:
        return
    raise ConfigError(f"a draft tree on {type(model).__name__}: {fault}; a chain works: draft without a tree")


def _tree_inputs(model: PreTrainedModel, visible: Tensor, past: int) -> dict[str, Tensor]:
    """Positions by depth [1, T], and the additive mask [1, 1, T, past + T] that sdpa and eager attention both take."""
    depth = visible.sum(dim=-1) - 1
    mask = torch.zeros(1, 1, len(visible), past + len(visible), dtype=model.dtype)
    mask[..., past:].masked_fill_(~visible, torch.finfo(model.dtype).min)
    return {"attention_mask": mask.to(model.device), "position_ids": (past + depth)[None].to(model.device)}


def chain_inputs(model: PreTrainedModel, cache: DynamicCache, num_tokens: int) -> dict[str, Tensor]:
    """Mask and positions of so many tokens after what the cache holds, where giving them saves time; else nothing.

    In half precision on a CPU attention without a mask is several times slower, and transformers makes none for a
    single token.
    """
    past = cache.get_seq_length()
    pays = (
        past
        and model.device.type == "cpu"
        and model.dtype in (torch.bfloat16, torch.float16)
        and model.config._attn_implementation == "sdpa"
        and all(type(layer) is DynamicLayer for layer in cache.layers)
        and model.is_backend_compatible()  # passes on a mask that is made here
        and "position_ids" in _arguments(type(model).forward)
    )
    return _tree_inputs(model, torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(), past) if pays else {}


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal LM whose `last_hidden_state` (after the norm) its output projection reads."""
    decoder: PreTrainedModel = model.get_decoder()
    return model.model if decoder is model else decoder  # Llama 4 finds none


def forward_block(
    model: PreTrainedModel,
    token_ids: list[int],
    cache: DynamicCache | None,
    *,
    logits_to_keep: int = 0,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Feed `token_ids` [T] after what the cache holds; without a cache they are the whole text.

    `visible` [T, T], bool: which of them see which (`tree.block_attention`), None for a chain.
    Returns the final hidden states [T, D] (after the norm, what the output projection reads) and logits [T, V];
    `logits_to_keep` n > 0 gives the last n logits only.
    """
    fresh = torch.tensor([token_ids], device=model.device)
    inputs: dict[str, Tensor] = {}
    if visible is not None:
        inputs = _tree_inputs(model, visible, 0 if cache is None else cache.get_seq_length())
    elif cache is not None:
        inputs = chain_inputs(model, cache, len(token_ids))
    states: list[Tensor] = []  # asked for by output_hidden_states, those of every layer would be kept
    handle = backbone(model).register_forward_hook(lambda module, given, output: states.append(output[0]))
    try:
        output = model(
            input_ids=fresh,
            **inputs,
            **{cache_argument(model): cache},
            use_cache=cache is not None,
            logits_to_keep=logits_to_keep,
        )
    finally:
        handle.remove()
    return states[-1][0], output.logits[0]


def shard_layers(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Share each layer's weights out over the processes of `mesh`, by FSDP2; gathered layer by layer as they run.

    Embeddings and output projection stay whole. Every process must run the model equally often. Returns the model, on
    the mesh's device. Raises ConfigError where the layers cannot be found.
    """
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ConfigError(f"shard_target: {type(model).__name__} has {len(stacks)} stacks of {count} layers, not one")
    for layer in stacks[0]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    torch.nn.Module.to(model, mesh.device_type)
    return model


def keep_fed(cache: DynamicCache, num_fed: int, kept: list[int]) -> None:
    """Of the last `num_fed` tokens in the cache keep those numbered `kept`, in this order, and drop the others."""
    if kept != list(range(len(kept))):
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                for states in (layer.keys, layer.values):  # [1, key heads, tokens, head size] each
                    fed = states[..., -num_fed:, :]
                    fed[..., : len(kept), :] = fed[..., kept, :]
    cache.crop(len(kept) - num_fed)


def output_projection(model: PreTrainedModel, config: PretrainedConfig) -> Projection:
    """How `model` turns final states into logits. A weight sharded by FSDP2 is gathered.

    Raises ConfigError on a weight sharded otherwise, which cannot be read outside the model's forward.
    """
    head, text = model.get_output_embeddings(), config.get_text_config()
    weight = _gathered(head.weight) if isinstance(head.weight, DTensor) else head.weight
    if weight.dim() != 2 or weight.shape[0] < text.vocab_size:
        raise ConfigError(
            "the output projection is sharded in a way that hides its rows (FSDP1, DeepSpeed ZeRO-3): use DDP, "
            "ZeRO-2 or FSDP2"
        )
    factors = [getattr(text, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    scale = prod(factors) / (getattr(text, "logits_scaling", None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None)
    return Projection(weight, getattr(head, "bias", None), float(scale), softcap)


@torch.inference_mode()
def check_projection(model: PreTrainedModel) -> None:
    """Raise ConfigError unless `output_projection` turns the states of a few tokens into the model's own logits.

    They may differ by rounding in the model's dtype; a wrong scale, cap or norm is far beyond it.
    """
    projection = output_projection(model, model.config)
    weight = projection.weight
    if weight.is_meta:  # moved off its device until it is needed
        return
    hidden, logits = forward_block(model, list(range(min(_PROBE_TOKENS, weight.shape[0]))), None)
    own = logits.to(weight.device).float()
    difference = float((projection.of(hidden.to(weight.device, weight.dtype)) - own).norm() / own.norm())
    tolerance = max(4 * torch.finfo(weight.dtype).eps, 1e-3)  # at least that of TF32
    if not difference <= tolerance:  # also where one is not a number
        raise ConfigError(
            f"{model.config.model_type}: its logits are not what its output projection makes of its states: they "
            f"differ by {difference:.1%}, expected {tolerance:.1%} at most (no final norm, or another scale?); "
            "training and acceptance would be of other logits, so this kind of model cannot be used"
        )


def _gathered(weight: DTensor) -> Tensor:
    """All rows of a sharded weight; processes average its gradient, as FSDP does with those of its own forward."""
    mesh = weight.device_mesh
    full: Tensor = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full
