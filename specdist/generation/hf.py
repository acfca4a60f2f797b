"""Owns writing with the target through transformers: prompt encoding and batched generation.

Shapes: `B` rows, `T` tokens of the padded prompts, `N` new tokens, `V` vocabulary.
Every random number belongs to a row: it comes from the row's seed and the step, never from the batch around it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdist.errors import ArtifactError, ConfigError
from specdist.schema import SamplingSpec
from specdist.verify import served_logprobs


class PromptRejected(ArtifactError):
    """One prompt cannot be given to the target. `reason` is a short key to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that control the model: declared special tokens and added tokens marked special."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the conversation up to where the answer starts, in one pass of the tokenizer's chat template.

    Raises ConfigError without a chat template; PromptRejected where the template refuses the messages ("template"), or
    where a content spells a control token ("control_token"): tokenised with the rest it would end or open a turn.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the target's tokenizer has no chat template; choose an instruct model or add one")
    special = special_token_ids(tokenizer)
    for i, message in enumerate(messages):
        if found := special.intersection(tokenizer(message["content"], add_special_tokens=False)["input_ids"]):
            tokens = tokenizer.convert_ids_to_tokens(sorted(found))
            raise PromptRejected("control_token", f"messages[{i}]: content spells the control tokens {tokens}")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except jinja2.TemplateError as error:
        raise PromptRejected("template", f"the chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])


class _RowSampler(LogitsProcessor):
    """Draws one token per row from the served distribution and makes it the argmax.

    Inverse CDF over ids: the smallest id whose cumulative probability exceeds uniform * total mass.
    """

    def __init__(self, sampling: SamplingSpec, seeds: Sequence[int], prompt_length: int, device: torch.device) -> None:
        self.sampling = sampling
        self.prompt_length = prompt_length
        uniforms = np.stack([np.random.default_rng(seed).random(sampling.max_new_tokens) for seed in seeds])
        self.uniforms = torch.from_numpy(uniforms).to(device)  # [B, N]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_length
        # softmax of log-probabilities is their exp, which is several times slower where many are -inf
        cumulative = served_logprobs(scores, self.sampling).softmax(-1).cumsum(-1, dtype=torch.float64)  # [B, V]
        total = cumulative[:, -1:]
        # Below the total, so that an id of probability 0 at the end is never reached by rounding.
        threshold = torch.minimum(self.uniforms[:, step, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, threshold, right=True)  # [B, 1]
        return scores.scatter_(1, tokens, torch.inf)


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Put `config` in place of the model's own, which `generate` takes for every field that is not set."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Raise ConfigError where a prompt with its answer, `length` tokens, exceeds the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(
            f"prompt and max_new_tokens come to {length} tokens, the target has {limit} positions; "
            "lower max_prompt_tokens or max_new_tokens"
        )


def generate(
    model: PreTrainedModel,
    batch_prompt_ids: list[list[int]],
    sampling: SamplingSpec,
    seeds: list[int],
    eos_token_ids: list[int],
    pad_token_id: int,
) -> list[tuple[list[int], str]]:
    """Completion ids and finish reason of each prompt, written in one left-padded batch.

    A completion ends with its first id of `eos_token_ids` ("stop") or after `max_new_tokens` ("length"). The draws of a
    row depend on its seed alone. The model's own generation defaults (penalties, sampling, lengths) are not used.
    Raises ConfigError where a prompt and its answer exceed the model's positions.
    """
    width = max(len(ids) for ids in batch_prompt_ids)
    check_positions(model, width + sampling.max_new_tokens)
    rows = [[pad_token_id] * (width - len(ids)) + ids for ids in batch_prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch_prompt_ids]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=pad_token_id,
        use_cache=True,
    )
    processors = LogitsProcessorList()
    if not sampling.is_greedy:
        processors.append(_RowSampler(sampling, seeds, width, model.device))
    with _generation_config(model, config), torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(rows, device=model.device),  # [B, T]
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config,
            logits_processor=processors,
        )  # [B, T + N]
    return [_finish(ids, set(eos_token_ids)) for ids in output[:, width:].tolist()]


def _finish(ids: list[int], stop: set[int]) -> tuple[list[int], str]:
    """Cut after the first stop id: what follows it is padding."""
    for i, token in enumerate(ids):
        if token in stop:
            return ids[: i + 1], "stop"
    return ids, "length"
