"""Measures acceptance by replay against decoding with the same drafter: what it costs, and whether both say the same.

On each prompt the target writes a text, which replay reads once for all draft lengths; then the decoder writes one at
each of --lengths, and replay reads that as well, so that both can be compared on equal texts. A run that was killed
goes on in --output.
"""

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark_log import RawLog
from benchmark_process import device, prepare_process, print_requirement
from decode_ways import BenchmarkPrompt, draft_drafter, opened_export, read_prompts
from torch import Tensor
from transformers import PreTrainedModel

from specdist import metrics
from specdist.config import MAX_SPECULATIVE_TOKENS
from specdist.decoding.loop import DecodeResult, decode
from specdist.drafter_config import HEAD_KINDS
from specdist.drafters.base import Drafter
from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.heads_file import heads_file, load_heads
from specdist.evaluation.acceptance import DraftModelScorer, HeadsScorer, Scorer, replay_rows, target_pass
from specdist.evaluation.speed import hardware_name
from specdist.progress import track
from specdist.replay import greedy_steps
from specdist.schema import DistillRow, PromptCounts, SamplingSpec
from specdist.stages.run import dtype_of
from specdist.target import Target, open_target

logger = logging.getLogger(__name__)
LOG, RESULT = "replay.jsonl", "replay.md"
COST_BAR = 1 / 20


@dataclasses.dataclass(frozen=True)
class Pair:
    """A drafter twice: at work, and as replay reads it. `method`: how its drafts are drawn."""

    drafter: Drafter
    scorer: Scorer
    method: str


def open_pair(name: str, target: Target, model: PreTrainedModel, sampling: SamplingSpec) -> Pair:
    """An exported drafter on the loaded target; heads draft a chain. Where the target samples, so does the drafter."""
    export, record = opened_export(name, target)
    method = "greedy" if sampling.is_greedy else "probabilistic"
    if record.drafter_kind in HEAD_KINDS:
        heads = HeadsOnTarget(load_heads(heads_file(export), target.identity.vocab_size), TargetEnds.of(model))
        return Pair(HeadsDrafter(heads), HeadsScorer(heads), method)
    drafter = draft_drafter(export, target, model)
    return Pair(drafter, DraftModelScorer(drafter.model, drafter.vocabulary), method)


class Measurement:
    """Texts and counters of one prompt after the other."""

    def __init__(self, model: PreTrainedModel, pair: Pair, sampling: SamplingSpec, eos_token_ids: list[int]) -> None:
        self.model, self.pair, self.sampling, self.eos = model, pair, sampling, eos_token_ids

    def _decode(self, prompt: BenchmarkPrompt, seed: int, length: int) -> tuple[DecodeResult, float]:
        """A text by the decoder at a draft length, 0 for the target alone; its seconds."""
        began = time.perf_counter()
        result = decode(
            self.model,
            prompt.token_ids,
            self.sampling,
            self.eos,
            drafter=self.pair.drafter if length else None,
            num_speculative_tokens=length,
            draft_sample_method=self.pair.method,
            generator=torch.Generator(device=self.model.device).manual_seed(seed),
        )
        return result, time.perf_counter() - began

    def _accept(self, prompt: BenchmarkPrompt, result: DecodeResult) -> Tensor:
        """Acceptances of a text [L, K]: a pass of the target over it, and one of the drafter."""
        row = text_row(prompt.id, prompt.domain, prompt.token_ids, result.completion_ids, self.sampling)
        return self.pair.scorer.accept(target_pass(self.model, row, self.sampling), self.sampling)[self.pair.method]

    def of_prompt(self, prompt: BenchmarkPrompt, number: int, lengths: Sequence[int]) -> dict[str, Any]:
        """Everything about one prompt, as it is logged."""
        own, write_seconds = self._decode(prompt, seed=number, length=0)
        began = time.perf_counter()
        accept = self._accept(prompt, own)
        row = {
            "prompt_id": prompt.id,
            "domain": prompt.domain,
            "completion_ids": own.completion_ids,
            "accept": accept.tolist(),
            "write_seconds": write_seconds,
            "read_seconds": time.perf_counter() - began,
            "decoded": {},
        }
        for length in lengths:
            result, seconds = self._decode(prompt, seed=1_000_003 * length + number, length=length)
            row["decoded"][str(length)] = {"seconds": seconds, **self._both(prompt, result, length)}
        return row

    def _both(self, prompt: BenchmarkPrompt, result: DecodeResult, length: int) -> dict[str, Any]:
        """Counters of a decoded text and of its replay, and whether their steps are the same (greedy)."""
        size = len(result.completion_ids)
        if size < 2:
            return {"counts": None, "replayed": None, "same": True}
        accept = self._accept(prompt, result)
        row = text_row(prompt.id, prompt.domain, prompt.token_ids, result.completion_ids, self.sampling)
        replayed = replay_rows([row], [accept], length)[0]
        same = not self.sampling.is_greedy or result.steps_in_text() == greedy_steps(accept, size, length)
        counts = result.counts(prompt.id, prompt.domain, length)
        return {"counts": counts.to_json(), "replayed": replayed.to_json(), "same": same}


def text_row(
    prompt_id: str, domain: str, prompt_ids: list[int], completion_ids: list[int], sampling: SamplingSpec
) -> DistillRow:
    """A text of the target as evaluation takes it."""
    return DistillRow(prompt_id, prompt_id, 0, 0, domain, prompt_ids, completion_ids, "length", sampling, 0)


def replayed_lengths(
    rows: Sequence[dict[str, Any]], sampling: SamplingSpec
) -> tuple[dict[int, list[PromptCounts]], float]:
    """Counters at every draft length from the acceptances of all texts of the target, and the seconds that took."""
    usable = [row for row in rows if len(row["completion_ids"]) > 1]
    texts = [text_row(row["prompt_id"], row["domain"], [], row["completion_ids"], sampling) for row in usable]
    accepts = [torch.tensor(row["accept"]) for row in usable]
    began = time.perf_counter()
    lengths = range(1, min(MAX_SPECULATIVE_TOKENS, accepts[0].shape[1]) + 1)
    counts = {length: replay_rows(texts, accepts, length) for length in lengths}
    return counts, time.perf_counter() - began


def decoded_counts(rows: Sequence[dict[str, Any]], length: int, which: str) -> list[PromptCounts]:
    """The counters of decoded texts, "counts" or "replayed", where anything was drafted."""
    found = [row["decoded"][str(length)][which] for row in rows]
    return [PromptCounts.from_json(counts, which) for counts in found if counts is not None]


def tau(counts: Sequence[PromptCounts]) -> tuple[float, list[float]]:
    """τ and its 95 % interval over prompts."""
    return metrics.pooled_length(counts), metrics.interval(metrics.bootstrap_lengths(counts))


@dataclasses.dataclass(frozen=True)
class Compared:
    """One draft length: τ with its interval by replay of the target's texts, by decoding, by replay of decoded texts.

    `num_same` of `num_texts`: decoded greedy texts of which every step is as replay says.
    """

    length: int
    replay: tuple[float, list[float]]
    decoded: tuple[float, list[float]]
    equal_text: tuple[float, list[float]]
    num_same: int
    num_texts: int

    @property
    def width_ratio(self) -> float:
        """Width of the interval by replay over that by decoding, on the same texts."""
        (_, (low, high)), (_, (least, most)) = self.equal_text, self.decoded
        if most == least:  # few texts, all alike
            return 1.0 if high == low else float("inf")
        return (high - low) / (most - least)

    @property
    def inside(self) -> bool:
        """Whether τ of the decoder lies in the interval of replay over the target's texts."""
        return self.replay[1][0] <= self.decoded[0] <= self.replay[1][1]


def compare(rows: Sequence[dict[str, Any]], counts: dict[int, list[PromptCounts]], length: int) -> Compared:
    """Both ways to know τ at one draft length."""
    return Compared(
        length,
        tau(counts[length]),
        tau(decoded_counts(rows, length, "counts")),
        tau(decoded_counts(rows, length, "replayed")),
        sum(row["decoded"][str(length)]["same"] for row in rows),
        len(rows),
    )


def table(compared: Sequence[Compared]) -> str:
    """Markdown of all draft lengths that were decoded."""

    def shown(value: tuple[float, list[float]]) -> str:
        return f"{value[0]:.3f} ({value[1][0]:.3f} to {value[1][1]:.3f})"

    head = "| γ | τ by replay of the target's texts | τ by decoding | τ by replay of decoded texts | interval's width |"
    rows = [
        f"| {c.length} | {shown(c.replay)} | {shown(c.decoded)} | {shown(c.equal_text)} | {c.width_ratio:.3f} |"
        for c in compared
    ]
    return "\n".join([head, "|---" * 5 + "|", *rows])


def judged(compared: Sequence[Compared], sampling: SamplingSpec) -> list[bool]:
    """Lines on what must hold of τ; whether each does."""
    if sampling.is_greedy:
        return [
            print_requirement(f"γ={c.length}, texts with other steps than replay's", c.num_texts - c.num_same, 0)
            for c in compared
        ]
    held = []
    for c in compared:
        distance = abs(c.decoded[0] - c.replay[0])
        print(f"γ={c.length}: decoding's τ is {distance:.3f} from replay's, {'in' if c.inside else 'OUTSIDE'} its 95 %")
        held += [c.inside, print_requirement(f"γ={c.length}, width of replay's interval", c.width_ratio, 1.0)]
    return held


def report(rows: Sequence[dict[str, Any]], lengths: Sequence[int], sampling: SamplingSpec, facts: str) -> str:
    """The result in Markdown."""
    counts, walk_seconds = replayed_lengths(rows, sampling)
    compared = [compare(rows, counts, length) for length in lengths]
    every = "; ".join(f"γ={n} {metrics.pooled_length(c):.3f}" for n, c in counts.items())
    return "\n\n".join(
        [
            facts,
            f"τ from one pass over the target's texts: {every}.",
            table(compared),
            "In brackets 95 % intervals over prompts. The last column is the width of the interval by replay over that "
            "by decoding, on the same texts.",
            cost_words(rows, len(counts), lengths, walk_seconds)[0],
        ]
    )


def cost_words(
    rows: Sequence[dict[str, Any]], num_replayed: int, lengths: Sequence[int], walk_seconds: float
) -> tuple[str, float]:
    """What replay at all lengths took beside decoding at `lengths`, in words and as a ratio."""
    read, write = (sum(row[f"{what}_seconds"] for row in rows) for what in ("read", "write"))
    decoding = sum(row["decoded"][str(n)]["seconds"] for row in rows for n in lengths)
    ratio = (read + walk_seconds) / decoding
    words = (
        f"Replay at {num_replayed} draft lengths took {read + walk_seconds:.1f} s ({read:.1f} s for the passes, "
        f"{walk_seconds:.1f} s for the counters), decoding at {len(lengths)} lengths {decoding:.1f} s: "
        f"1/{1 / ratio:.0f}. That the target wrote the texts took {write:.1f} s, which serve every drafter."
    )
    return words, ratio


def measure(args: argparse.Namespace) -> tuple[RawLog, SamplingSpec, str]:
    """Fill the log; what was measured, and on what."""
    prepare_process(args.threads)
    target = open_target(args.target)
    model = target.load_model(dtype_of(args.dtype), device())
    sampling = SamplingSpec(temperature=args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens)
    pair = open_pair(args.drafter, target, model, sampling)
    prompts = read_prompts(args.prompts, target, args.num_prompts, args.max_prompt_tokens)
    args.lengths = [n for n in args.lengths if n <= pair.scorer.max_speculative_tokens]
    settings = {"target": target.identity.weights_sha256, "drafter": args.drafter, "sampling": sampling.to_json()}
    settings |= {"lengths": args.lengths, "dtype": args.dtype, "threads": torch.get_num_threads()}
    log = RawLog(args.output / LOG, settings)
    left = [item for item in enumerate(prompts) if item[1].id not in log.prompt_ids]
    measurement = Measurement(model, pair, sampling, target.identity.eos_token_ids)
    with torch.inference_mode():
        if left:
            Measurement(model, pair, dataclasses.replace(sampling, max_new_tokens=4), []).of_prompt(left[0][1], 0, [1])
        for number, prompt in track(left, len(left), "prompts", logger):
            log.add(measurement.of_prompt(prompt, number, args.lengths))
    facts = (
        f"{target.identity.model_id}, {hardware_name(model.device)}, {torch.get_num_threads()} threads, {args.dtype}, "
        f"temperature {args.temperature:g}, top-p {args.top_p:g}: {len(log.rows)} prompts, at most "
        f"{args.max_new_tokens} new tokens."
    )
    return log, sampling, facts


def run(args: argparse.Namespace) -> bool:
    """Measure what the log lacks, print and write the result. Returns whether all that must hold does."""
    log, sampling, facts = measure(args)
    text = report(log.rows, args.lengths, sampling, facts)
    (args.output / RESULT).write_text(text + "\n", encoding="utf-8")
    print(text + "\n")
    counts, walk_seconds = replayed_lengths(log.rows, sampling)
    held = judged([compare(log.rows, counts, n) for n in args.lengths], sampling)
    if len(args.lengths) == len(counts):
        ratio = cost_words(log.rows, len(counts), args.lengths, walk_seconds)[1]
        held.append(print_requirement(f"replay at all {len(counts)} draft lengths beside decoding", ratio, COST_BAR))
    return all(held)


def main(arguments: list[str]) -> int:
    """Measure as the command line says. Returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(
        "benchmark.py replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    add("--drafter", required=True, help="an exported draft model or heads, or a run of one")
    add("--prompts", type=Path, required=True, help="JSONL with messages and domain; first turns are answered")
    add("--num-prompts", type=int, default=10)
    add("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0, help="0: greedy, where both must agree step by step (in float32)")
    add("--top-p", type=float, default=1.0)
    every = list(range(1, MAX_SPECULATIVE_TOKENS + 1))
    add("--lengths", nargs="+", type=int, default=every, help="of blocks, at which it is decoded")
    add("--dtype", default="float32", choices=["bfloat16", "float32"])
    add("--threads", type=int, help="of the CPU; default: all cores")
    add("--output", type=Path, required=True, help="directory for the raw results and the table")
    return 0 if run(parser.parse_args(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
