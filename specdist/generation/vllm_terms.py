"""Owns what the engines on vLLM share: a request in vLLM's words, and what its answer must hold to be taken.

Shapes: n completion tokens, K best tokens of each. Imports no vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdist.errors import ArtifactError
from specdist.generation.engine import Answer, Request, TopLogprobs


@dataclass(frozen=True)
class VllmTerms:
    """What is asked of vLLM with every request."""

    eos_token_ids: Sequence[int]
    num_top_logprobs: int = 0

    def fields(self, request: Request) -> dict[str, Any]:
        """Fields of SamplingParams, and of the server's API. All that shape a draw, so that no default of others does.

        vLLM's own idea of the end of text is off: only `eos_token_ids` end an answer.
        """
        sampling = request.sampling
        return {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": 0,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": None if sampling.is_greedy else request.seed,
            "stop_token_ids": list(self.eos_token_ids),
            "ignore_eos": True,
            "logprobs": self.num_top_logprobs or None,
        }

    def answer(
        self,
        request: Request,
        completion_ids: list[int],
        finish_reason: str | None,
        best: Sequence[dict[int, float]] | None,
        source: str,
    ) -> Answer:
        """The answer, of which `best` has the log-probabilities of each token's best ids.

        Raises ArtifactError, which starts with `source`, where something else than the request ended it or a
        log-probability is missing.
        """
        where = f"{source}: row {request.key}"
        ended = bool(completion_ids) and completion_ids[-1] in self.eos_token_ids
        if finish_reason not in ("stop", "length"):
            raise ArtifactError(f"{where}: finish_reason {finish_reason!r}, expected stop or length")
        if finish_reason == "stop" and not ended:
            raise ArtifactError(
                f"{where}: stopped at token {completion_ids[-1:]}, which is not in eos_token_ids "
                f"{sorted(self.eos_token_ids)}; something else than the request has stop tokens"
            )
        if finish_reason == "length" and len(completion_ids) != request.sampling.max_new_tokens:
            raise ArtifactError(
                f"{where}: cut after {len(completion_ids)} tokens, asked for {request.sampling.max_new_tokens}; "
                "serve the target without a limit of the server's own (--generation-config vllm)"
            )
        top = self._top_logprobs(completion_ids, best or [], where) if self.num_top_logprobs else None
        # vLLM says length of an end of text that is the last token allowed
        return Answer(request, completion_ids, "stop" if ended else finish_reason, top)

    def _top_logprobs(self, completion_ids: list[int], best: Sequence[dict[int, float]], where: str) -> TopLogprobs:
        if len(best) != len(completion_ids):
            raise ArtifactError(f"{where}: log-probabilities of {len(best)} tokens, expected {len(completion_ids)}")
        ranked = [self._ranked(token, found) for token, found in zip(completion_ids, best, strict=True)]
        if short := [i for i, entries in enumerate(ranked) if len(entries) != self.num_top_logprobs]:
            raise ArtifactError(
                f"{where}: {len(ranked[short[0]])} best tokens at position {short[0]}, expected {self.num_top_logprobs}"
            )
        ids = [[token for token, _ in entries] for entries in ranked]
        return TopLogprobs(ids, [[logprob for _, logprob in entries] for entries in ranked])

    def _ranked(self, token: int, found: dict[int, float]) -> list[tuple[int, float]]:
        """Best first. A drawn token that is not among the K best comes with them, and goes here."""
        extra = len(found) > self.num_top_logprobs
        entries = [(other, logprob) for other, logprob in found.items() if not extra or other != token]
        return sorted(entries, key=lambda entry: -entry[1])


def check_length(request: Request, context_length: int, remedy: str) -> None:
    """Raise ArtifactError where the prompt with its answer is longer than the context: it would be cut in silence."""
    prompt, answer = len(request.prompt_ids), request.sampling.max_new_tokens
    if prompt + answer > context_length:
        raise ArtifactError(
            f"row {request.key}: prompt of {prompt} and answer of up to {answer} tokens, the engine's context has "
            f"{context_length}; {remedy}"
        )
