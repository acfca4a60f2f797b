"""Measures decoding with each drafter against the target alone, greedy, batch size 1, all ways in turn on each prompt.

Raw timings are JSON lines in --output: a run that was killed goes on there (draft lengths by policy then learn anew).
"""

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmark_log import RawLog
from benchmark_process import device, prepare_process
from decode_ways import (
    ASSISTED,
    ASSISTED_DEFAULTS,
    DRAFT,
    DRAFT_BY_POLICY,
    GENERATE,
    LOOP,
    BenchmarkPrompt,
    DecodeWays,
    PassClock,
    Way,
    read_prompts,
)

from specdist import metrics
from specdist.decoding.policies import POLICIES
from specdist.evaluation.speed import hardware_name
from specdist.progress import track
from specdist.stages.run import dtype_of
from specdist.target import open_target

logger = logging.getLogger(__name__)
LOG, RESULT = "timings.jsonl", "decode.md"
_WARM_UP = 8  # tokens that each way decodes first
_ASSISTED_BAR, _DRAFTER_BAR = 1.15, 1.3


@dataclass(frozen=True)
class Timing:
    """One text by one way. `passes`: the target's, with the prompt's; `block_tokens`: fed in all others.

    Seconds: of all, in drafting, in the target's passes, in its first pass. `same`: whether the text is `generate`'s.
    """

    tokens: int
    seconds: float
    draft_seconds: float
    target_seconds: float
    first_seconds: float
    passes: int
    block_tokens: int
    same: bool = True


@dataclass(frozen=True)
class Line:
    """One prompt through all ways, as it is logged."""

    prompt_id: str
    domain: str
    timings: dict[str, Timing]


def logged_lines(log: RawLog) -> list[Line]:
    """All rows of the log."""
    return [
        Line(row["prompt_id"], row["domain"], {way: Timing(**timing) for way, timing in row["timings"].items()})
        for row in log.rows
    ]


def timed(way: Way, clock: PassClock, prompt: BenchmarkPrompt, max_new_tokens: int) -> tuple[Timing, list[int]]:
    """Decode a prompt by one way: its timing and the text."""
    clock.clear()
    began = time.perf_counter()
    text = way(prompt.token_ids, max_new_tokens)
    seconds = time.perf_counter() - began
    first, passes, fed = clock.seconds[0], len(clock.seconds), sum(clock.tokens[1:])
    return Timing(
        len(text.token_ids), seconds, text.draft_seconds, sum(clock.seconds), first, passes, fed
    ), text.token_ids


def measure(ways: dict[str, Way], clock: PassClock, prompts: Sequence[BenchmarkPrompt], new: int, log: RawLog) -> None:
    """Time what is not in the log yet. The order of ways is another for each prompt, so that none is always first."""
    done, names = log.prompt_ids, list(ways)
    left = [(i, prompt) for i, prompt in enumerate(prompts) if prompt.id not in done]
    for name in names if left else []:
        timed(ways[name], clock, left[0][1], min(new, _WARM_UP))
    for i, prompt in track(left, len(left), "timing", logger):
        turn = i % len(names)
        found = {name: timed(ways[name], clock, prompt, new) for name in names[turn:] + names[:turn]}
        own = found[GENERATE][1]
        timings = {n: Timing(**{**asdict(found[n][0]), "same": found[n][1] == own}) for n in names}
        log.add(asdict(Line(prompt.id, prompt.domain, timings)))


class Totals:
    """Sums of one way over prompts."""

    def __init__(self, lines: Sequence[Line], way: str) -> None:
        timings = [line.timings[way] for line in lines]
        self.pairs = [[t.tokens, t.seconds] for t in timings]
        self.tokens, self.seconds = sum(t.tokens for t in timings), sum(t.seconds for t in timings)
        self.drafting, self.verifying = sum(t.draft_seconds for t in timings), sum(t.target_seconds for t in timings)
        self.overhead = self.seconds - self.drafting - self.verifying
        self.steps = sum(t.passes - 1 for t in timings)
        self.step_seconds = (self.verifying - sum(t.first_seconds for t in timings)) / max(1, self.steps)
        self.tau = (self.tokens - len(timings)) / max(1, self.steps)
        self.block = sum(t.block_tokens for t in timings) / max(1, self.steps) - 1
        self.rate, self.same = self.tokens / self.seconds, sum(t.same for t in timings)

    def against(self, other: "Totals") -> tuple[float, list[float]]:
        """Tokens per second over those of `other`, and its 95 % interval over prompts."""
        rows = [[*ours, *theirs] for ours, theirs in zip(self.pairs, other.pairs, strict=True)]
        return self.rate / other.rate, metrics.interval(metrics.bootstrap_rate_ratios(rows))


HEAD = (
    "| way | tokens/s | times the target alone (95 %) | τ | drafted per step "
    "| drafting | verifying | overhead | same text |"
)


def table(lines: Sequence[Line], ways: Sequence[str]) -> str:
    """Markdown of all ways over these prompts."""
    rows, alone = [HEAD, "|---" * 9 + "|"], Totals(lines, GENERATE)
    for way in ways:
        t = Totals(lines, way)
        ratio, (low, high) = t.against(alone)
        shares = " | ".join(f"{100 * part / t.seconds:.0f} %" for part in (t.drafting, t.verifying, t.overhead))
        rows.append(
            f"| {way} | {t.rate:.1f} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {t.tau:.2f} | {t.block:.2f} | {shares} "
            f"| {t.same} of {len(lines)} |"
        )
    return "\n".join(rows)


def eaten(ours: Totals, other: Totals, alone: Totals) -> str:
    """What the ratio would be without each cost in turn, the largest first: that one eats most."""
    verified = ours.seconds - ours.steps * (ours.step_seconds - alone.step_seconds)
    without = {
        "without the time of drafting": ours.tokens / (ours.seconds - ours.drafting),
        "were a verified block as cheap as one token": ours.tokens / verified,
        "without overhead": ours.tokens / (ours.seconds - ours.overhead),
    }
    order = sorted(without.items(), key=lambda item: -item[1])
    return "; ".join(f"{words} {rate / other.rate:.2f}" for words, rate in order)


def bar(totals: dict[str, Totals], ours: str, other: str, least: float) -> str:
    """A line that says whether `ours` makes at least `least` times the tokens per second of `other`.

    At 1 it must not be shown to be slower: its interval must reach 1. A bar that is missed has a second line.
    """
    ratio, (low, high) = totals[ours].against(totals[other])
    held = (high if least == 1.0 else ratio) >= least
    words = f"{ratio:.2f} ({low:.2f} to {high:.2f}) times {other}, at least {least:g}"
    said = f"* {'held' if held else 'NOT HELD'}: {ours}: {words}"
    return said if held else f"{said}. {eaten(totals[ours], totals[other], totals[LOOP]).capitalize()}"


def bars(lines: Sequence[Line], ways: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """All bars that the measured ways allow to judge."""
    totals = {way: Totals(lines, way) for way in ways}

    def best(names: Sequence[str]) -> str:
        return max(names, key=lambda name: totals[name].rate)

    adaptive = [way for way in ways if way.startswith(DRAFT_BY_POLICY.format(""))]
    said = [bar(totals, LOOP, GENERATE, 1.0)]
    fixed = [DRAFT.format(n) for n in lengths if DRAFT.format(n) in ways]
    if fixed:
        said += [bar(totals, DRAFT.format(n), ASSISTED.format(n), _ASSISTED_BAR) for n in lengths]
        theirs = best([ASSISTED_DEFAULTS, *(ASSISTED.format(n) for n in lengths)])
        said.append(bar(totals, best([*fixed, *adaptive]), theirs, _ASSISTED_BAR))
    drafters = [way for way in ways if way not in (GENERATE, LOOP) and not way.startswith("assisted")]
    if drafters:
        said.append(bar(totals, best(drafters), GENERATE, _DRAFTER_BAR))
    if fixed and adaptive:
        worst = min(fixed, key=lambda name: totals[name].rate)
        said += [bar(totals, best(adaptive), best(fixed), 1.0), bar(totals, best(adaptive), worst, 1.0)]
    return said


def result(lines: Sequence[Line], ways: Sequence[str], lengths: Sequence[int], facts: str) -> str:
    """The whole result in Markdown: all prompts, the bars, and each domain where there are several."""
    domains = sorted({line.domain for line in lines})
    parts = [facts, table(lines, ways), "\n".join(bars(lines, ways, lengths))]
    for domain in domains if len(domains) > 1 else []:
        of_domain = [line for line in lines if line.domain == domain]
        parts.append(f"### {domain}, {len(of_domain)} prompts\n\n{table(of_domain, ways)}")
    parts.append(
        "τ: tokens per pass of the target after the first (assisted generation drafts before the first one as well, "
        "so its τ is a little too high). Drafting: all that a step does before the target's pass; verifying: in the "
        "target's passes, the prompt's included; overhead: the rest."
    )
    return "\n\n".join(parts) + "\n"


def run(args: argparse.Namespace) -> None:
    """Measure what the log lacks, then print and write the result."""
    prepare_process(args.threads)
    target = open_target(args.target)
    model = target.load_model(dtype_of(args.dtype), device())
    prompts = read_prompts(args.prompts, target, args.num_prompts, args.max_prompt_tokens, args.domains)
    made = DecodeWays(target, model)
    made.add_ngram(args.ngram)
    if args.drafter:
        made.add_draft(args.drafter, args.lengths, args.policies)
    for name in args.heads:
        made.add_heads(name)
    names = list(made.ways)
    settings = {
        "target": target.identity.weights_sha256,
        "drafters": [args.drafter, *args.heads],
        "ways": names,
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
    }
    log = RawLog(args.output / LOG, settings)
    with torch.inference_mode():
        measure(made.ways, PassClock(model), prompts, args.max_new_tokens, log)
    facts = (
        f"{target.identity.model_id}, {hardware_name(model.device)}, {torch.get_num_threads()} threads, {args.dtype}, "
        f"batch size 1, greedy: {len(log.rows)} prompts, at most {args.max_new_tokens} new tokens; each prompt went "
        "through all ways in turn."
    )
    text = result(logged_lines(log), names, args.lengths, facts)
    (args.output / RESULT).write_text(text, encoding="utf-8")
    print(text)


def main(arguments: list[str]) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        "benchmark.py decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    add("--prompts", type=Path, required=True, help="JSONL with messages and domain; first turns are answered")
    add("--domains", nargs="+", default=[], help="as many prompts of each of these, in turn; default: all")
    add("--num-prompts", type=int, default=100)
    add("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=128)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--ngram", nargs="*", type=int, default=[4], help="draft lengths of n-gram lookup")
    add("--drafter", help="an exported draft model, or a run of one")
    add("--lengths", nargs="+", type=int, default=[1, 2, 4], help="of the draft model's blocks; each is a way")
    add("--policies", nargs="*", default=[], choices=POLICIES[1:], help="draft lengths that adapt, from the longest on")
    add("--heads", nargs="*", default=[], help="exported draft heads, or runs of them")
    add("--threads", type=int, help="of the CPU; default: all cores")
    add("--output", type=Path, required=True, help="directory for the raw timings and the result")
    run(parser.parse_args(arguments))
