"""Owns one vLLM server as a writer: what it must be, how a request is put to it, what its answers must hold.

Token ids go in and come out. vLLM 0.10.2 is the first that gives them (`return_token_ids`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from specdist.errors import ArtifactError
from specdist.generation.engine import Answer, Request
from specdist.generation.http_json import JsonServer, Unavailable
from specdist.generation.vllm_terms import VllmTerms
from specdist.schema import SamplingSpec

# The shortest answer that shows whether log-probabilities are those at temperature 1: of the distribution that is
# drawn from, all but the best token are impossible.
_CHECK = SamplingSpec(temperature=0.5, top_k=1, max_new_tokens=2)
_CHECK_BEST = 2
_IMPOSSIBLE = -1000.0  # natural logarithm; servers write -9999 for minus infinity


@dataclass(frozen=True)
class TokenizerProbe:
    """A conversation and the ids that it has here; a server with another tokenizer or chat template gives others."""

    messages: list[dict[str, str]]
    prompt_ids: list[int]
    template_arguments: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What each server must be: its model's name, or else names that the target goes by; the tokenizer, by probes."""

    model: str | None
    target_names: Sequence[str]
    probes: Sequence[TokenizerProbe]
    terms: VllmTerms


class Endpoint:
    """One server. `model`, `version` and `context_length` are known when `check` has passed."""

    def __init__(self, url: str, expected: Expected) -> None:
        """Raises ConfigError where `url` is none."""
        self._server, self._expected = JsonServer(url), expected
        self.url = self._server.url
        self.model, self.version, self.context_length = "", "", 0

    async def check(self, client: httpx.AsyncClient, context_length: int = 0) -> None:
        """Make sure that the server is what it must be, with a context of `context_length` tokens or more.

        Raises Unavailable where it cannot say now, ArtifactError where it is something else.
        """
        self.model = self._choose(await self._get(client, "/v1/models", "data", list))
        self.version = await self._get(client, "/version", "version", str)
        self.context_length = min([await self._check_tokenizer(client, probe) for probe in self._expected.probes])
        if self.context_length < context_length:
            raise ArtifactError(
                f"endpoint {self.url}: context of {self.context_length} tokens, the others have {context_length}; "
                "serve the target with the same --max-model-len everywhere"
            )
        await self._check_answer(client)

    async def _get(self, client: httpx.AsyncClient, path: str, name: str, kind: type[Any]) -> Any:
        return self._server.field(await self._server.get(client, path), name, kind)

    def _choose(self, cards: list[dict[str, Any]]) -> str:
        wanted = [self._expected.model] if self._expected.model else list(self._expected.target_names)
        for card in cards:
            names = {card.get("id")} if self._expected.model else {card.get("id"), card.get("root")}
            if names.intersection(wanted):
                return str(card["id"])
        served = [f"{card.get('id')} (from {card.get('root')})" for card in cards]
        raise ArtifactError(
            f"endpoint {self.url}: serves {', '.join(served) or 'nothing'}, expected {' or '.join(wanted)}; "
            "serve the target there, or configure the name that it has there"
        )

    async def _check_tokenizer(self, client: httpx.AsyncClient, probe: TokenizerProbe) -> int:
        """The context length, if the server renders the probe as it was rendered here."""
        body = {
            "model": self.model,
            "messages": probe.messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": probe.template_arguments,
            "tools": probe.tools or None,
        }
        reply = await self._server.post(client, "/tokenize", body)
        ids = self._server.field(reply, "tokens", list)
        if ids != probe.prompt_ids:
            same = [a == b for a, b in zip(ids, probe.prompt_ids, strict=False)]
            raise ArtifactError(
                f"endpoint {self.url}: another tokenizer or chat template: it renders a conversation to {len(ids)} "
                f"ids, the target's renders it to {len(probe.prompt_ids)}, the first difference is at position "
                f"{[*same, False].index(False)}; serve the target's own directory, without other template defaults"
            )
        return self._server.field(reply, "max_model_len", int)

    async def _check_answer(self, client: httpx.AsyncClient) -> None:
        """A short answer has token ids and, where they are asked for, log-probabilities at temperature 1."""
        terms = self._expected.terms
        if terms.num_top_logprobs:
            terms = replace(terms, num_top_logprobs=max(_CHECK_BEST, terms.num_top_logprobs))
        request = Request("probe", self._expected.probes[0].prompt_ids, _CHECK, seed=0)
        answer = await self._complete(client, request, terms)
        for logprobs in answer.top.logprobs if answer.top else []:
            if min(logprobs) < _IMPOSSIBLE or sum(map(math.exp, logprobs)) > 1.001:
                raise ArtifactError(
                    f"endpoint {self.url}: log-probabilities {logprobs} are not those at temperature 1; "
                    "serve the target with --logprobs-mode raw_logprobs, vLLM's default"
                )

    async def complete(self, client: httpx.AsyncClient, request: Request) -> Answer:
        """The answer to a request. Raises Unavailable, or ArtifactError where asking again would not help."""
        return await self._complete(client, request, self._expected.terms)

    async def _complete(self, client: httpx.AsyncClient, request: Request, terms: VllmTerms) -> Answer:
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            **terms.fields(request),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reply = await self._server.post(client, "/v1/completions", body)
        if (model := self._server.field(reply, "model", str)) != self.model:
            raise ArtifactError(f"endpoint {self.url}: answers as model {model}, expected {self.model}")
        choices = self._server.field(reply, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise ArtifactError(f"endpoint {self.url}: {len(choices)} choices in its reply, expected 1")
        return self._answer(request, choices[0], terms)

    def _answer(self, request: Request, choice: dict[str, Any], terms: VllmTerms) -> Answer:
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise ArtifactError(
                f"endpoint {self.url}: answers without token ids (has {sorted(choice)}); vLLM 0.10.2 and newer give "
                "them for return_token_ids, and what lies between must let that pass"
            )
        if choice.get("prompt_token_ids") not in (None, request.prompt_ids):
            raise ArtifactError(f"endpoint {self.url}: row {request.key}: it read other prompt ids than were sent")
        if choice.get("finish_reason") == "abort":
            raise Unavailable("the server ended the request", is_reached=True)
        steps = (choice.get("logprobs") or {}).get("top_logprobs") or []
        try:
            best = [{int(token.removeprefix("token_id:")): logprob for token, logprob in s.items()} for s in steps]
        except ValueError as error:
            raise ArtifactError(f"endpoint {self.url}: log-probabilities of words, expected of token ids") from error
        return terms.answer(request, ids, choice.get("finish_reason"), best, f"endpoint {self.url}")
