"""Owns the draft model: a small causal LM that shares the target's tokenizer. Makes it, checks it, drafts with it.

Shapes: N drafted tokens, V vocabulary of the target.
"""

import copy
import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdist.drafters.base import DecodeContext, Proposal
from specdist.errors import ArtifactError, ConfigError, TokenizerMismatch
from specdist.target import Target, cache_argument
from specdist.verify import sample, served_logprobs

logger = logging.getLogger(__name__)


def _check_layers(layers: list[int], available: int) -> None:
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer < available for layer in layers):
        raise ConfigError(f"draft_layers {layers}: expected one or more different layers, 0 to {available - 1}")


def _pruned_config(config: PretrainedConfig, layers: list[int]) -> PretrainedConfig:
    pruned = copy.deepcopy(config)
    pruned.num_hidden_layers = len(layers)
    if getattr(pruned, "layer_types", None):
        pruned.layer_types = [config.layer_types[layer] for layer in layers]
    return pruned


def prune_layers(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A draft model from the target's own embeddings, norm, output projection and the named decoder layers, in order.

    Raises ConfigError on an index that the target lacks and on a model whose layers are not in `model.layers`.
    """
    _check_layers(layers, target.config.get_text_config().num_hidden_layers)
    config = _pruned_config(target.config, layers)
    draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    origin = {f"model.layers.{i}.": f"model.layers.{layer}." for i, layer in enumerate(layers)}
    source = target.state_dict()
    state = {}
    for name in draft.state_dict():
        prefix = ".".join(name.split(".")[:3]) + "."
        origin_name = origin[prefix] + name.removeprefix(prefix) if prefix in origin else name
        if origin_name not in source:
            raise ConfigError(
                f"init prune: {type(target).__name__} has no tensor {origin_name}; "
                "pruning knows models whose decoder layers are model.layers.N: name a draft model instead (--init)"
            )
        state[name] = source[origin_name]
    draft.load_state_dict(state)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_name: str) -> None:
    """Raise TokenizerMismatch, naming the first differing token, unless both map every token to the same id."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    token = min(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)),
        key=lambda t: (min(ours.get(t, 1 << 60), theirs.get(t, 1 << 60)), t),
    )
    raise TokenizerMismatch(
        f"draft model {draft_name}: its tokenizer differs from the target's, first at token {token!r}: "
        f"target id {ours.get(token)}, draft id {theirs.get(token)} ({len(ours)} and {len(theirs)} tokens in all). "
        "Acceptance compares token ids, so both must share one tokenizer: take a draft model of the target's family, "
        "or --init prune"
    )


def load_draft_model(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a causal LM for drafting, in evaluation mode. Raises ArtifactError where it cannot be read."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map={"": device})
    except (OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"draft model {path}: cannot be loaded ({error})") from error
    return model.eval()


def check_draft_model(init: str, layers: list[int], target: Target) -> int:
    """Check, without loading weights, that `init` can be made for `target`; returns its size in bytes in fp32.

    Raises TokenizerMismatch, ArtifactError (no such model) or ConfigError (no such layer).
    """
    if init == "prune":
        config = target.config
        _check_layers(layers, config.get_text_config().num_hidden_layers)
        config = _pruned_config(config, layers)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(init)
            config = AutoConfig.from_pretrained(init)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"init {init!r}: no causal LM with a tokenizer can be read from it ({error})"
            ) from error
        check_same_tokenizer(target.tokenizer, tokenizer, init)
    with torch.device("meta"):
        return 4 * AutoModelForCausalLM.from_config(config).num_parameters()


def make_draft_model(init: str, layers: list[int], target: Target) -> PreTrainedModel:
    """The draft model to train, in fp32: `init` "prune" cuts it from the target, else it names any causal LM.

    A vocabulary that differs in padding is brought to the target's size, since engines compare sizes; rows that are
    added have zero weights. Raises as `check_draft_model`.
    """
    check_draft_model(init, layers, target)
    if init == "prune":
        return prune_layers(target.load_model(torch.float32), layers)
    model = load_draft_model(init, torch.float32)
    before, vocab_size = model.config.get_text_config().vocab_size, target.identity.vocab_size
    if before != vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        for rows in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            rows.data[before:] = 0.0
    return model


class DraftModelDrafter:
    """Drafts token by token with a causal LM and its own KV cache."""

    max_draft_tokens: int | None = None

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        """`vocab_size`: the target's; ids at or above it (padding rows) are never proposed."""
        self.model = model
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    def _logits(self, token_ids: list[int]) -> Tensor:
        """Next-token logits [V] after feeding what the cache does not hold yet."""
        fresh = torch.tensor([token_ids[self.cache.get_seq_length() :]], device=self.model.device)
        output = self.model(
            input_ids=fresh, **{cache_argument(self.model): self.cache}, use_cache=True, logits_to_keep=1
        )
        logits = output.logits[0, -1, : self.vocab_size].float()
        return torch.nn.functional.pad(logits, (0, self.vocab_size - len(logits)), value=-torch.inf)  # [V]

    @torch.inference_mode()
    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        tokens, rows = list(context.token_ids), []
        for _ in range(max_tokens):
            logits = self._logits(tokens)
            if context.draft_sampling is None:
                tokens.append(int(logits.argmax()))
            else:
                rows.append(served_logprobs(logits, context.draft_sampling).exp())
                tokens.append(int(sample(rows[-1], context.generator)))
        drafted = torch.tensor(tokens[len(context.token_ids) :])
        return Proposal(drafted, torch.stack(rows) if rows else None)

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        # The newest token has not been fed. The last draft never was either, so there may be nothing to cut.
        excess = self.cache.get_seq_length() - (num_committed - 1)
        if excess > 0:
            self.cache.crop(-excess)
