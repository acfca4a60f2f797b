"""The ways to decode that are compared: transformers' own, and our loop with every drafter that is at hand; greedy."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from specdist.dataset.render import PromptRejected, Renderer
from specdist.decoding.loop import decode
from specdist.decoding.policies import DraftLengthPolicy, FixedLength, make_policy
from specdist.drafters.base import Drafter
from specdist.drafters.causal_lm import DraftModelDrafter, load_draft_model, load_for_drafting
from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.heads_file import draft_tree, heads_file, load_heads
from specdist.drafters.ngram import NgramDrafter
from specdist.errors import ConfigError
from specdist.export.record import ExportRecord, check_made_for, read_record
from specdist.schema import ChatFormat, SamplingSpec
from specdist.stages.named_drafter import find_drafter
from specdist.target import Target

GENERATE, LOOP = "target alone, generate", "target alone, our loop"
ASSISTED, ASSISTED_DEFAULTS = "assisted generation, γ={}", "assisted generation, its defaults"
DRAFT, DRAFT_BY_POLICY = "draft model, γ={}", "draft model, by {}"
_KIND = {"medusa": "Medusa", "hydra": "Hydra"}


@dataclass(frozen=True)
class Text:
    """What a way wrote, and its seconds in drafting: all that a step does before the target's pass."""

    token_ids: list[int]
    draft_seconds: float = 0.0


Way = Callable[[list[int], int], Text]  # token ids of a prompt, the most new tokens


@dataclass(frozen=True)
class BenchmarkPrompt:
    """The first turn of a conversation, rendered."""

    id: str
    domain: str
    token_ids: list[int]


def read_prompts(
    path: Path, target: Target, limit: int, longest: int, domains: Sequence[str] = ()
) -> list[BenchmarkPrompt]:
    """First turns of a JSONL file, up to `longest` tokens: `limit` of them, spread over the file.

    With `domains` as many of each, one after the other in turn. Raises ConfigError where there is none.
    """
    renderer = Renderer(target.tokenizer, ChatFormat())
    found: dict[str, list[BenchmarkPrompt]] = {}
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        roles = [message["role"] for message in row["messages"]]
        if domains and row["domain"] not in domains:
            continue
        try:
            token_ids = renderer.encode(row["messages"][: roles.index("user") + 1])
        except PromptRejected:
            continue
        if len(token_ids) <= longest:
            group = row["domain"] if domains else ""
            found.setdefault(group, []).append(BenchmarkPrompt(row["id"], row["domain"], token_ids))
    if not found or (missing := set(domains) - found.keys()):
        raise ConfigError(f"{path}: no usable prompt of {sorted(missing) if found else 'any domain'}")
    taken = [_spread(prompts, -(-limit // len(found))) for prompts in found.values()]
    return [prompt for group in zip_longest(*taken) for prompt in group if prompt is not None][:limit]


def _spread(prompts: list[BenchmarkPrompt], limit: int) -> list[BenchmarkPrompt]:
    return [prompts[i * len(prompts) // limit] for i in range(limit)] if limit < len(prompts) else prompts


def opened_export(name: str, target: Target) -> tuple[Path, ExportRecord]:
    """An export (or run, or registry's version) that was made for `target` and leaves it as it is."""
    export = find_drafter(name, Path("runs/registry"))
    record = read_record(export)
    check_made_for(record, target)
    if not record.lossless:
        raise ConfigError(f"{export}: changes the target, so it is no drafter for the one that is measured")
    return export, record


def draft_drafter(export: Path, target: Target, model: PreTrainedModel) -> DraftModelDrafter:
    """An exported draft model at work beside the loaded target."""
    return DraftModelDrafter(*load_for_drafting(export, target, model.dtype, model.device))


class DecodeWays:
    """All ways on one loaded target, by name, in the order in which they were added."""

    def __init__(self, target: Target, model: PreTrainedModel) -> None:
        self.target, self.model, self.eos = target, model, target.identity.eos_token_ids
        self.ways: dict[str, Way] = {GENERATE: self._by_generate(), LOOP: self._by_loop(None, FixedLength(0))}

    def add_ngram(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            self.ways[f"n-gram, γ={length}"] = self._by_loop(NgramDrafter(), FixedLength(length))

    def add_draft(self, name: str, lengths: Sequence[int], policies: Sequence[str]) -> None:
        """An exported draft model: by our loop at fixed lengths and by policies, by assisted generation at the same."""
        export, _ = opened_export(name, self.target)
        drafter, start = draft_drafter(export, self.target, self.model), max(lengths)
        for length in lengths:
            self.ways[DRAFT.format(length)] = self._by_loop(drafter, FixedLength(length))
        for policy in policies:
            self.ways[DRAFT_BY_POLICY.format(policy)] = self._by_loop(drafter, make_policy(policy, start))
        assistant = load_draft_model(export, self.model.dtype, self.model.device)  # with the full vocabulary
        for length in lengths:
            self.ways[ASSISTED.format(length)] = self._by_generate(
                assistant,
                num_assistant_tokens=length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
        self.ways[ASSISTED_DEFAULTS] = self._by_generate(assistant)

    def add_heads(self, name: str) -> None:
        """Exported heads: the chain that they were measured best with, and the tree that lies with them."""
        export, record = opened_export(name, self.target)
        heads = load_heads(heads_file(export), self.target.identity.vocab_size)
        tree, kind = draft_tree(export, heads.num_heads), _KIND[record.drafter_kind]
        on_target = HeadsOnTarget(heads, TargetEnds.of(self.model))
        length = record.speculative_config["num_speculative_tokens"]
        self.ways[f"{kind} chain, γ={length}"] = self._by_loop(HeadsDrafter(on_target), FixedLength(length))
        if tree is not None:
            self.ways[f"{kind} tree of {tree.num_nodes}"] = self._by_loop(
                HeadsDrafter(on_target, tree), FixedLength(tree.depth)
            )

    def _by_loop(self, drafter: Drafter | None, policy: DraftLengthPolicy) -> Way:
        """Our loop. The policy goes on from text to text."""

        def way(prompt_ids: list[int], max_new_tokens: int) -> Text:
            sampling = SamplingSpec(max_new_tokens=max_new_tokens)
            result = decode(self.model, prompt_ids, sampling, self.eos, drafter=drafter, policy=policy)
            return Text(result.completion_ids, result.draft_seconds)

        return way

    def _by_generate(self, assistant: PreTrainedModel | None = None, **settings: Any) -> Way:
        """Transformers' `generate`, with an assistant under `settings` of its generation configuration."""
        model, timer = self.model, _CallTimer(assistant.generate) if assistant else None

        def way(prompt_ids: list[int], max_new_tokens: int) -> Text:
            config = GenerationConfig(
                do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=self.eos, pad_token_id=self.eos[0]
            )
            more: dict[str, Any] = {}
            if assistant is not None and timer is not None:
                assistant.generation_config = GenerationConfig(**settings)
                assistant.generate, timer.seconds = timer, 0.0  # as a method, but timed
                more = {"assistant_model": assistant}
            ids = torch.tensor([prompt_ids], device=model.device)
            texts = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **more)
            return Text(texts[0, len(prompt_ids) :].tolist(), timer.seconds if timer else 0.0)

        return way


class _CallTimer:
    """A function that adds up the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        result = self.function(*arguments, **keywords)
        self.seconds += time.perf_counter() - began
        return result


class PassClock:
    """Seconds of each forward pass of a model since `clear`, and the tokens that it was fed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.on_cuda = model.device.type == "cuda"
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        self.clear()

    def clear(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def _begin(self, module: torch.nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        self.tokens.append(keywords["input_ids"].shape[1])
        self.began = time.perf_counter()

    def _end(self, *arguments: Any) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
