"""Owns what tests of distillation datasets share: prompts, a tiny target's engine, and a dataset made of both."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import LlamaForCausalLM

from specdist.dataset.distill import build_dataset
from specdist.dataset.prompts import prompt_id
from specdist.dataset.render import Renderer
from specdist.generation.engine import Engine
from specdist.generation.hf import TransformersEngine
from specdist.schema import ChatFormat, DatasetInputs, DatasetManifest, Prompt, SamplingSpec, TargetIdentity

TOKENIZER = make_tiny_tokenizer()
EOS = [TOKENIZER.eos_token_id, *range(16)]  # many, so that rows end at different steps
TARGET = TargetIdentity("tiny", "w" * 64, "t" * 64, "c" * 64, len(TOKENIZER), EOS)
SAMPLED = SamplingSpec(temperature=0.9, top_p=0.95, max_new_tokens=10)
INPUTS = DatasetInputs(
    target=TARGET,
    prompts_sha256="p" * 64,
    chat_format=ChatFormat(),
    samplings=[SamplingSpec(max_new_tokens=10), SAMPLED, SAMPLED],
    max_prompt_tokens=100,
    context_length=512,
    engine="transformers",
    dtype="float32",
    seed=0,
    num_top_logprobs=0,
)


def prompt(*contents: str, domain: str = "general") -> Prompt:
    messages = [{"role": "user", "content": content} for content in contents]
    return Prompt(prompt_id(messages), domain, "en", messages)


PROMPTS = [prompt("tell me " + "the other one " * (i % 5) + str(i), domain=("even", "odd")[i % 2]) for i in range(10)]
PROMPTS += [prompt(f"first {i}", f"then {i}", domain="chat") for i in range(2)]
NUM_ROWS = 3 * (10 + 2 * 2)


def engine(model: LlamaForCausalLM, *, batch_rows: int = 5, num_top_logprobs: int = 0) -> Engine:
    return TransformersEngine(
        model,
        eos_token_ids=EOS,
        pad_token_id=265,
        max_batch_rows=batch_rows,
        max_batch_tokens=100_000,
        num_top_logprobs=num_top_logprobs,
    )


def tiny_engine(kind: type[TransformersEngine] = TransformersEngine, *, eos: Sequence[int] = EOS) -> Engine:
    """The tiny target in an engine of this class, which ends texts at `eos`."""
    model = make_tiny_llama(len(TOKENIZER))
    return kind(model, eos_token_ids=eos, pad_token_id=265, max_batch_rows=4, max_batch_tokens=9999)


def build(
    directory: Path,
    prompts: list[Prompt] = PROMPTS,
    inputs: DatasetInputs = INPUTS,
    make_engine: Callable[[], Engine] = lambda: engine(make_tiny_llama(len(TOKENIZER))),
    **settings: Any,
) -> DatasetManifest:
    renderer = Renderer(TOKENIZER, inputs.chat_format)
    return build_dataset(directory, inputs, prompts, renderer, make_engine, **({"shard_rows": 8} | settings))
