"""Owns writing with the target through vLLM in this process. The only module that imports vLLM."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdist.errors import MissingDependency
from specdist.generation.engine import Answer, Request
from specdist.generation.vllm_terms import VllmTerms, check_length

# What the caller has set wins.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported over the network
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit locks that threads of torch and tokenizers hold
}


def _import_vllm() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise MissingDependency(
            f"engine vllm: vLLM cannot be imported ({error}); pip install vllm, or use the engine transformers, "
            "or serve the target elsewhere and use the engine server"
        ) from error
    return vllm


class VllmEngine:
    """The target opened by vLLM, which batches requests as they come. `close` gives its memory back."""

    def __init__(
        self,
        target_path: Path,
        dtype: str,
        *,
        eos_token_ids: Sequence[int],
        max_in_flight: int,
        context_length: int | None = None,
        num_top_logprobs: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
    ) -> None:
        """`context_length` None takes the target's own, for which vLLM must have room.

        Raises MissingDependency where vLLM is not installed.
        """
        self._vllm = _import_vllm()
        self._terms = VllmTerms(tuple(eos_token_ids), num_top_logprobs)
        self._max_in_flight = max_in_flight
        self._llm = self._vllm.LLM(
            str(target_path),
            skip_tokenizer_init=True,
            dtype=dtype,
            generation_config="vllm",
            max_model_len=context_length,
            max_num_seqs=max_in_flight,
            max_logprobs=max(1, num_top_logprobs),
            logprobs_mode="raw_logprobs",
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
        )
        self.name = f"vllm {self._vllm.__version__}"
        self.context_length: int | None = self._llm.llm_engine.model_config.max_model_len

    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """See Engine. Raises ArtifactError where a prompt with its answer exceeds the context."""
        engine = self._llm.llm_engine
        waiting: dict[str, Request] = {}
        try:
            while True:
                while len(waiting) < self._max_in_flight and (request := next_request()) is not None:
                    self._add(request)
                    waiting[request.key] = request
                if not waiting:
                    return
                for output in engine.step():
                    if output.finished:
                        yield self._answer(waiting.pop(output.request_id), output.outputs[0])
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def _add(self, request: Request) -> None:
        check_length(request, self.context_length or 0, "lower max_prompt_tokens or max_new_tokens")
        params = self._vllm.SamplingParams(
            **self._terms.fields(request),
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids}
        self._llm.llm_engine.add_request(request.key, prompt, params)

    def _answer(self, request: Request, output: Any) -> Answer:
        best = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs or []]
        return self._terms.answer(request, list(output.token_ids), output.finish_reason, best, self.name)

    def close(self) -> None:
        """End vLLM's process, so that its memory is free for what follows in this one."""
        self._llm.llm_engine.engine_core.shutdown()
