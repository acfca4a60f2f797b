"""Owns which engine writes with the target, as configured."""

import os
from collections.abc import Callable

from transformers import PreTrainedModel

from specdist.config import RecipeConfig
from specdist.dataset.render import Renderer
from specdist.generation.endpoint import TokenizerProbe
from specdist.generation.engine import Engine
from specdist.generation.hf import TransformersEngine
from specdist.generation.server import ServerEngine
from specdist.generation.vllm import VllmEngine
from specdist.target import Target


def embedded_engine(
    config: RecipeConfig, target: Target, load_model: Callable[[], PreTrainedModel], num_top_logprobs: int = 0
) -> Engine:
    """transformers in this process."""
    pad = target.tokenizer.pad_token_id
    return TransformersEngine(
        load_model(),
        eos_token_ids=target.identity.eos_token_ids,
        pad_token_id=target.identity.eos_token_ids[0] if pad is None else pad,
        max_batch_rows=config.data.generation_batch_rows,
        max_batch_tokens=config.data.generation_batch_tokens,
        num_top_logprobs=num_top_logprobs,
    )


def training_engine(
    config: RecipeConfig, target: Target, context_length: int, load_model: Callable[[], PreTrainedModel]
) -> Engine:
    """What writes the answers to train on. `load_model` is called for the embedded engine alone."""
    data = config.data
    if data.engine == "server":
        return server_engine(config, target)
    if data.engine == "vllm":
        return VllmEngine(
            target.path,
            config.target.target_dtype,
            eos_token_ids=target.identity.eos_token_ids,
            max_in_flight=data.max_in_flight,
            context_length=context_length,
            num_top_logprobs=data.top_logprobs,
            tensor_parallel_size=data.tensor_parallel_size,
        )
    return embedded_engine(config, target, load_model, data.top_logprobs)


def server_engine(config: RecipeConfig, target: Target) -> Engine:
    """vLLM servers, each of which is checked first. Raises ArtifactError where one is something else or none is up."""
    data = config.data
    return ServerEngine(
        data.server_urls,
        model=data.server_model,
        target_names=[target.identity.model_id, target.path.name, str(target.path), str(target.path.absolute())],
        probes=[_probe(Renderer(target.tokenizer, data.chat_format()))],
        eos_token_ids=target.identity.eos_token_ids,
        max_in_flight=data.max_in_flight,
        timeout=data.server_timeout,
        num_top_logprobs=data.top_logprobs,
        api_key=os.environ.get("VLLM_API_KEY"),
    )


def _probe(renderer: Renderer) -> TokenizerProbe:
    """A conversation of several turns and scripts, rendered here."""
    contents = ["Hi! 你好, what is 12 × 3?", "36.", "And in words?\n"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    form = renderer.format
    return TokenizerProbe(
        renderer.prepared(messages), renderer.encode(messages), form.template_arguments, list(form.tools)
    )
