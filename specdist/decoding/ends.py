"""Owns where a text ends: at an EOS id, at the token that completes a stop string, or at the most new tokens."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation import StopStringCriteria

from specdist.schema import SamplingSpec

_NO_TOKEN = torch.iinfo(torch.int64).max  # beyond every vocabulary: the criterion takes it for no text


def most_new_tokens(model: PreTrainedModel, prompt_ids: list[int], sampling: SamplingSpec) -> int:
    """Tokens that may follow the prompt: `sampling.max_new_tokens`, fewer where the model's context ends before."""
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(sampling.max_new_tokens, context_length - len(prompt_ids)) if context_length else sampling.max_new_tokens


@dataclass(frozen=True)
class Stops:
    """What ends a text before its limit. `strings` is the criterion of transformers' `generate(stop_strings=…)`.

    As there, the token that completes a stop string is the last, with whatever of it goes on after the string, and a
    string may begin in the prompt.
    """

    token_ids: Collection[int]
    strings: StopStringCriteria | None = None

    def cut(self, token_ids: list[int], num_fresh: int) -> bool:
        """Cut a text after the first of its `num_fresh` last tokens that ends it. Returns whether one does."""
        first = len(token_ids) - num_fresh
        ends = [i for i in range(first, len(token_ids)) if token_ids[i] in self.token_ids][:1]
        if self.strings is not None and num_fresh:
            ends += self._completed(self.strings, token_ids, first)[:1]
        if ends:
            del token_ids[min(ends) + 1 :]
        return bool(ends)

    def _completed(self, strings: StopStringCriteria, token_ids: list[int], first: int) -> list[int]:
        """Positions from `first` on at which a stop string is complete: all in one call, a row for each position."""
        width = strings.maximum_token_len
        padded = [_NO_TOKEN] * width + token_ids
        rows = [padded[i + 1 : i + 1 + width] for i in range(first, len(token_ids))]  # each ends with token i
        return [first + i for i, done in enumerate(strings(torch.tensor(rows), None).tolist()) if done]
