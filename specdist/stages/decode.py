"""Owns `specdist decode`: an answer as it is decoded, with what was drafted in colour, and its counters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TextIO

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from specdist.dataset.render import Renderer
from specdist.dataset.show import visible
from specdist.decoding.loop import DecodeResult, decode
from specdist.decoding.policies import DraftLengthPolicy, make_policy
from specdist.decoding.text import IncrementalText
from specdist.errors import ConfigError
from specdist.evaluation.fit_table import aligned
from specdist.metrics import mean_accepted_length
from specdist.schema import ChatFormat, SamplingSpec
from specdist.stages.named_drafter import ALONE, DrafterChoice, OpenedDrafter, open_drafter
from specdist.stages.process import keep_freed_memory, use_all_cores
from specdist.stages.run import dtype_of
from specdist.target import Target, open_target

ACCEPTED, PLAIN = "\033[32m", "\033[0m"  # green; each token is closed, so that an interrupt leaves no colour behind
_WARM_UP = 8  # tokens that are decoded first where two are timed


@dataclass(frozen=True)
class DecodeRequest:
    """What is asked of `specdist decode`. `policy`: one of POLICIES; `seed` draws where the target samples."""

    target: str
    prompt: str
    choice: DrafterChoice
    sampling: SamplingSpec
    policy: str = "fixed"
    system_prompt: str | None = None
    stop: Sequence[str] = ()
    dtype: str = "bfloat16"
    seed: int = 0
    beside_target: bool = False


class _Decoder:
    """One prompt of a request, decoded as often as wanted: draft lengths and random numbers start anew each time."""

    def __init__(self, request: DecodeRequest, target: Target, opened: OpenedDrafter, prompt_ids: list[int]) -> None:
        self.request, self.opened, self.prompt_ids = request, opened, prompt_ids
        self.eos_token_ids = target.identity.eos_token_ids
        self.stop_strings = StopStringCriteria(target.tokenizer, list(request.stop)) if request.stop else None

    def _policy(self) -> DraftLengthPolicy | None:
        drafter = self.opened.drafter
        return make_policy(self.request.policy, self.opened.length, drafter.max_draft_tokens) if drafter else None

    def answer(
        self, drafts: bool, max_new_tokens: int, on_step: Callable[[list[int], int], None] | None = None
    ) -> DecodeResult:
        """Decode with the drafter, or by the target alone."""
        return decode(
            self.opened.model,
            self.prompt_ids,
            replace(self.request.sampling, max_new_tokens=max_new_tokens),
            self.eos_token_ids,
            drafter=self.opened.drafter if drafts else None,
            policy=self._policy() if drafts else None,
            stop_strings=self.stop_strings,
            generator=torch.Generator(device=self.opened.model.device).manual_seed(self.request.seed),
            on_step=on_step,
        )


class AnswerWriter:
    """Writes an answer to `out` while it is decoded, accepted drafts in ACCEPTED where `colour` says so.

    A character of several tokens has the colour of the token that completes it. To a terminal no control character
    passes; elsewhere the text is written as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, *, colour: bool) -> None:
        self.text, self.out, self.colour = IncrementalText(tokenizer), out, colour

    def step(self, token_ids: list[int], num_accepted: int) -> None:
        """What one step of the decoder added, its first `num_accepted` tokens drafted (`decode`, on_step)."""
        for i, piece in enumerate(self.text.add(token_ids)):
            self._write(piece, accepted=i < num_accepted)
        self.out.flush()

    def end(self) -> None:
        self._write(self.text.rest(), accepted=False)
        self.out.write("\n")
        self.out.flush()

    def _write(self, piece: str, *, accepted: bool) -> None:
        shown = visible(piece) if self.out.isatty() else piece
        self.out.write(f"{ACCEPTED}{shown}{PLAIN}" if shown and accepted and self.colour else shown)


def decode_prompt(request: DecodeRequest, out: TextIO, notes: TextIO, *, colour: bool) -> None:
    """Decode one prompt: the answer goes to `out`, what is said of it to `notes`.

    Raises ArtifactError where the target or the drafter cannot be opened or the prompt cannot be rendered, ConfigError
    where they do not go together.
    """
    use_all_cores()
    keep_freed_memory()
    target = open_target(request.target)
    prompt_ids = _prompt_ids(request, target)
    opened = open_drafter(request.choice, target, dtype_of(request.dtype), PartialState().device)
    if request.beside_target and opened.drafter is None:
        raise ConfigError("beside the target alone, but nothing drafts: name a drafter")
    decoder, longest = _Decoder(request, target, opened, prompt_ids), request.sampling.max_new_tokens
    ways = [True, False] if request.beside_target else [True]
    for drafts in ways if request.beside_target else []:
        decoder.answer(drafts, min(_WARM_UP, longest))
    results: dict[str, DecodeResult] = {}
    for drafts in ways:
        name = opened.words if drafts else ALONE
        length = f", γ = {opened.length} ({request.policy})" if drafts and opened.drafter else ""
        notes.write(f"{name}{length}{', accepted drafts in green' if length and colour else ''}\n")
        notes.flush()
        writer = AnswerWriter(target.tokenizer, out, colour=colour)
        results[name] = decoder.answer(drafts, longest, writer.step)
        writer.end()
    lines = counter_lines(results)
    if request.beside_target:
        ours, alone = results.values()
        lines += comparison_lines(ours, alone, request)
    notes.write("\n".join(["", *lines, ""]))


def _prompt_ids(request: DecodeRequest, target: Target) -> list[int]:
    if not request.prompt.strip():
        raise ConfigError("the prompt is empty: give one as the argument, or on standard input")
    renderer = Renderer(target.tokenizer, ChatFormat(system_prompt=request.system_prompt))
    prompt_ids = renderer.encode([{"role": "user", "content": request.prompt}])
    if len(prompt_ids) >= (target.context_length or len(prompt_ids) + 1):
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, and the target's context ends at {target.context_length}; "
            "shorten it"
        )
    return prompt_ids


def _seconds(result: DecodeResult) -> float:
    return result.prefill_seconds + result.draft_seconds + result.verify_seconds


def _rate(result: DecodeResult) -> float:
    """Tokens per second, the time to read the prompt included."""
    return len(result.completion_ids) / _seconds(result)


def _counters(result: DecodeResult) -> dict[str, str]:
    lengths = result.draft_lengths()
    counts = result.counts("", "", max(lengths, default=0))
    drafted, accepted, steps = counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_drafts
    return {
        "tokens": str(len(result.completion_ids)),
        "seconds": f"{_seconds(result):.2f}",
        "tokens per second": f"{_rate(result):.1f}",
        "seconds to the first token": f"{result.prefill_seconds:.2f}",
        "steps after it": f"{steps:.0f}",
        "tokens per step (τ)": f"{mean_accepted_length(accepted, steps):.2f}" if steps else "-",
        "drafts accepted": f"{accepted:.0f} of {drafted:.0f}",
        "acceptance rate": f"{accepted / drafted:.1%}" if drafted else "-",
        "draft lengths (steps)": ", ".join(f"{length} ({number})" for length, number in lengths.items()) or "-",
    }


def counter_lines(results: dict[str, DecodeResult]) -> list[str]:
    """The counters of each result as a table, a column each; README.md says what they mean."""
    columns = {name: _counters(result) for name, result in results.items()}
    names = list(next(iter(columns.values())))
    rows = [["", *columns], *([name, *(column[name] for column in columns.values())] for name in names)]
    return aligned(rows, left=1)


def comparison_lines(ours: DecodeResult, alone: DecodeResult, request: DecodeRequest) -> list[str]:
    """Speed beside the target alone, and whether the texts are the same."""
    speed = f"  speed: {_rate(ours) / _rate(alone):.2f} times the target alone's, one run each"
    if not request.sampling.is_greedy:
        return [speed, "  text: sampled with other random numbers, so the two are not expected to be the same"]
    if ours.completion_ids == alone.completion_ids:
        return [speed, "  text: the same as the target alone writes"]
    pairs = zip(ours.completion_ids, alone.completion_ids, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [
        speed,
        f"  text: differs from token {same + 1} on; in {request.dtype} near-equal logits may fall either way"
        + ", --dtype float32 tells" * (request.dtype != "float32"),
    ]
