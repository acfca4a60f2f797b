"""Owns writing with the target through transformers, in this process: which rows are written together, and their draws.

Shapes: B rows of the running batch, K best tokens, V vocabulary.
Every random number belongs to a row: it comes from the row's seed and the step, never from the batch around it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdist.errors import ConfigError
from specdist.generation.cache import Batch, new_batch
from specdist.generation.engine import Answer, Request, TopLogprobs
from specdist.in_place import WIDTH_STEP, without
from specdist.schema import SamplingSpec
from specdist.verify import served_logprobs

JOIN_SHARE = 8  # new rows join when an eighth of the places is free


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Raise ConfigError where a prompt with its answer, `length` tokens, exceeds the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(
            f"prompt and max_new_tokens come to {length} tokens, the target has {limit} positions; "
            "lower max_prompt_tokens or max_new_tokens"
        )


@dataclass
class _Row:
    """An answer while it is being written."""

    request: Request
    uniforms: list[float]  # [max_new_tokens] in [0, 1); empty where the answer is greedy
    completion_ids: list[int] = field(default_factory=list)
    top: TopLogprobs = field(default_factory=lambda: TopLogprobs([], []))

    @property
    def length(self) -> int:
        """Tokens with prompt, now."""
        return len(self.request.prompt_ids) + len(self.completion_ids)

    @property
    def last_id(self) -> int:
        return self.completion_ids[-1] if self.completion_ids else self.request.prompt_ids[-1]


def _new_row(request: Request) -> _Row:
    spec = request.sampling
    return _Row(
        request, [] if spec.is_greedy else np.random.default_rng(request.seed).random(spec.max_new_tokens).tolist()
    )


def _room(request: Request) -> int:
    """Tokens of the request's prompt and longest answer."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


class _Intake:
    """Requests as they come; one that does not fit yet is held for later."""

    def __init__(self, next_request: Callable[[], Request | None]) -> None:
        self.next_request = next_request
        self.held: Request | None = None

    def take(self) -> Request | None:
        request, self.held = self.held or self.next_request(), None
        return request


def _draw(logits: Tensor, sampling: SamplingSpec, uniforms: Tensor) -> Tensor:
    """One token of each row of `logits` [B, V] from the served distribution, by `uniforms` [B] in [0, 1): [B].

    Inverse CDF over ids: the smallest id whose cumulative probability exceeds uniform * total mass.
    """
    # softmax of log-probabilities is their exp, which is several times slower where many are -inf
    cumulative = served_logprobs(logits, sampling).softmax(-1).cumsum(-1, dtype=torch.float64)  # [B, V]
    total = cumulative[:, -1:]
    # Below the total, so that an id of probability 0 at the end is never reached by rounding.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _choose(rows: list[_Row], logits: Tensor) -> list[int]:
    """The next token of every row, by its own sampling. `logits` [B, V]"""
    alike: dict[SamplingSpec, list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault(row.request.sampling, []).append(i)
    tokens = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    for sampling, members in alike.items():
        chosen = logits if len(members) == len(rows) else logits[members]
        if sampling.is_greedy:
            tokens[members] = chosen.argmax(-1)
        else:
            uniforms = [rows[i].uniforms[len(rows[i].completion_ids)] for i in members]
            tokens[members] = _draw(chosen, sampling, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    return tokens.tolist()


class TransformersEngine:
    """Writes with the model in this process, many answers at a time: a row that is done makes room for the next.

    The model's own generation defaults (penalties, sampling, lengths) are not used. A row's answer depends on its
    request alone; the batch around it changes logits by rounding only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: list[int],
        pad_token_id: int,
        max_batch_rows: int,
        max_batch_tokens: int,
        num_top_logprobs: int = 0,
    ) -> None:
        self.name = f"transformers {transformers.__version__}"
        self.context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.model = model
        self.stop = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_rows = max_batch_rows
        self.max_batch_tokens = max_batch_tokens
        self.num_top_logprobs = num_top_logprobs

    @torch.inference_mode()
    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """Write what is requested; see engine.Engine.

        Raises ConfigError where a prompt with its answer exceeds the model's positions or `max_batch_tokens`.
        """
        batch, intake = new_batch(self.model, self.pad_token_id), _Intake(next_request)
        rows: list[_Row] = []
        while rows := self._admit(rows, intake, batch):
            logits = batch.step([row.last_id for row in rows], [row.length - 1 for row in rows])  # [B, V]
            self._append(rows, logits)
            done = [i for i, row in enumerate(rows) if self._finish_reason(row)]
            if done:
                order = without(done, len(rows))
                batch.keep(order)
                finished, rows = [rows[i] for i in done], [rows[i] for i in order]
                yield from map(self._answer, finished)

    def _places(self, requests: list[Request]) -> tuple[int, int]:
        """How many rows the cache has room for, and of how many tokens each, where `requests` are among them."""
        width = -(-max(map(_room, requests)) // WIDTH_STEP) * WIDTH_STEP
        return max(1, min(self.max_batch_rows, self.max_batch_tokens // width)), width

    def _admit(self, rows: list[_Row], intake: _Intake, batch: Batch) -> list[_Row]:
        """Let new rows join `rows` where there is room for several: reading prompts one by one costs more."""
        running = [row.request for row in rows]
        if rows:
            places, _ = self._places(running)
            if not batch.joins_midway or places - len(rows) < max(1, places // JOIN_SHARE):
                return rows
        fresh: list[Request] = []
        while (request := intake.take()) is not None:
            self._check(request)
            if len(running) + len(fresh) + 1 > self._places([*running, *fresh, request])[0]:
                intake.held = request
                break
            fresh.append(request)
        if fresh:
            fresh.sort(key=lambda request: -len(request.prompt_ids))
            batch.join([request.prompt_ids for request in fresh], *self._places(running + fresh))
        return rows + [_new_row(request) for request in fresh]

    def _check(self, request: Request) -> None:
        check_positions(self.model, _room(request))
        if _room(request) > self.max_batch_tokens:
            raise ConfigError(
                f"a prompt with its answer comes to {_room(request)} tokens, the batch has room for "
                f"{self.max_batch_tokens}; raise it, or lower max_prompt_tokens or max_new_tokens"
            )

    def _append(self, rows: list[_Row], logits: Tensor) -> None:
        """Give every row its next token."""
        for row, token in zip(rows, _choose(rows, logits), strict=True):
            row.completion_ids.append(token)
        if self.num_top_logprobs:
            best = logits.float().log_softmax(-1).topk(self.num_top_logprobs)  # [B, K]
            for row, ids, values in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True):
                row.top.ids.append(ids)
                row.top.logprobs.append(values)

    def _finish_reason(self, row: _Row) -> str | None:
        if row.completion_ids[-1] in self.stop:
            return "stop"
        return "length" if len(row.completion_ids) == row.request.sampling.max_new_tokens else None

    def _answer(self, row: _Row) -> Answer:
        top = row.top if self.num_top_logprobs else None
        return Answer(row.request, row.completion_ids, self._finish_reason(row) or "length", top)

    def close(self) -> None:
        """Let go of the model, which is the caller's."""
        del self.model
