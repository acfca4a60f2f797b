"""Owns wall-clock measurement: speculative decoding against the target alone, interleaved, at any batch size.

The unit of statistics is the prompt, with all its texts and repeats: repeats tell of the clock, not of other prompts.
"""

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist import metrics
from specdist.decoding.loop import DecodeResult, decode, decode_batch
from specdist.drafters.base import Drafter
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import NOTHING_DRAFTED
from specdist.in_place import fits_in_place
from specdist.progress import track
from specdist.schema import DistillRow, SamplingSpec, Speed, SpeedPoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timing:
    """One decode of a batch: output tokens, all seconds, and the seconds and number of its parts.

    `of_texts`: output tokens of each text and its share of the seconds. `steps` and `accepted_tokens` are those of all
    its texts; `passes` of the target after the prompts, and `draft_rounds`, tokens drafted one after the other, are
    shared by the texts.
    """

    tokens: int
    seconds: float
    of_texts: list[tuple[int, float]]
    steps: int
    accepted_tokens: int
    passes: int
    draft_rounds: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class _Way:
    """A way to draft that is timed: how many tokens a block has, or levels of the drafter's tree."""

    drafter: Drafter
    length: int


def _shares(seconds: Sequence[float]) -> list[float]:
    """What each text had of a batch's time, from the `seconds` that it took part: those who do share each pass evenly.

    They sum to the longest, which are the batch's seconds.
    """
    shares, share, before = [0.0] * len(seconds), 0.0, 0.0
    for ended, text in enumerate(sorted(range(len(seconds)), key=lambda i: seconds[i])):
        share += (seconds[text] - before) / (len(seconds) - ended)
        shares[text], before = share, seconds[text]
    return shares


def _timing(results: Sequence[DecodeResult]) -> _Timing:
    last = max(results, key=lambda result: result.seconds)  # the text that took part in every pass
    steps = [step for result in results for step in result.steps]
    lengths = [len(result.completion_ids) for result in results]
    return _Timing(
        sum(lengths),
        last.seconds,
        list(zip(lengths, _shares([result.seconds for result in results]), strict=True)),
        len(steps),
        sum(step.accepted for step in steps),
        len(last.steps),
        sum(step.drafted for step in last.steps),
        last.draft_seconds,
        last.verify_seconds,
    )


def hardware_name(device: torch.device) -> str:
    """The processor's or the GPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    cores = sum(line.startswith("processor") for line in lines)
    return f"{', '.join(sorted(names)) or platform.processor() or platform.machine()}, {cores or '?'} cores"


def _total(timings: Sequence[_Timing], field: str) -> float:
    return float(sum(getattr(timing, field) for timing in timings))


def _draft_seconds(timings: Sequence[_Timing]) -> float:
    """Seconds of drafting one token, for every text of the batch; of looking for some where there was none."""
    return _total(timings, "draft_seconds") / max(1.0, _total(timings, "draft_rounds"))


def _by_prompt(batches: Sequence[Sequence[DistillRow]], timings: Sequence[_Timing]) -> dict[str, list[float]]:
    """Output tokens and seconds of each prompt, summed over its texts and their repeats."""
    sums: dict[str, list[float]] = {}
    for batch, timing in zip(batches, timings, strict=True):
        for row, (tokens, seconds) in zip(batch, timing.of_texts, strict=True):
            so_far = sums.get(row.prompt_id, [0.0, 0.0])
            sums[row.prompt_id] = [so_far[0] + tokens, so_far[1] + seconds]
    return sums


def _point(
    way: _Way,
    batches: Sequence[Sequence[DistillRow]],
    fast: list[_Timing],
    plain: list[_Timing],
    step_seconds: float,
) -> SpeedPoint:
    # Speed is tokens per second on both sides: in half precision the two texts may part at a tie and end elsewhere.
    ours, theirs = _by_prompt(batches, fast), _by_prompt(batches, plain)
    rates = [[*ours[prompt], *theirs[prompt]] for prompt in theirs]
    tau = metrics.mean_accepted_length(_total(fast, "accepted_tokens"), _total(fast, "steps"))
    return SpeedPoint(
        num_speculative_tokens=way.length,
        tokens_per_second=_total(fast, "tokens") / _total(fast, "seconds"),
        speedup=_total(fast, "tokens") / _total(fast, "seconds") * _total(plain, "seconds") / _total(plain, "tokens"),
        speedup_interval=metrics.interval(metrics.bootstrap_rate_ratios(rates)),
        mean_accepted_length=tau,
        predicted_speedup=metrics.predicted_speedup(
            tau,
            way.length,
            _draft_seconds(fast) / step_seconds,
            _total(fast, "verify_seconds") / _total(fast, "passes") / step_seconds,
        ),
        num_tree_nodes=way.drafter.tree.num_nodes if way.drafter.tree else None,
    )


def reachable_lengths(drafter: Drafter, lengths: Sequence[int]) -> list[int]:
    """Draft lengths, each once, shortest first; in place of those beyond what the drafter has, the most that it has."""
    longest = drafter.max_draft_tokens
    return sorted({n if longest is None else min(n, longest) for n in lengths})


def _ways(drafter: Drafter, lengths: Sequence[int], trees: Sequence[Drafter]) -> list[_Way]:
    reachable = reachable_lengths(drafter, lengths)
    if max(lengths) > max(reachable):
        logger.warning("speed at draft lengths %s: this drafter has %d tokens at most", lengths, max(reachable))
    chains = [_Way(drafter, n) for n in reachable]
    return chains + [_Way(tree, tree.tree.depth) for tree in trees if tree.tree]


def _check_batches(model: PreTrainedModel, batch_size: int) -> None:
    if batch_size > 1 and not fits_in_place(model):
        raise ConfigError(
            f"speed at batch size {batch_size}: the cache of {type(model).__name__} cannot be written in place, so it "
            "decodes one prompt after the other; measure batch size 1"
        )


def measure_speed(
    model: PreTrainedModel,
    drafter: Drafter,
    rows: Sequence[DistillRow],
    sampling: SamplingSpec,
    eos_token_ids: list[int],
    *,
    lengths: Sequence[int],
    repeats: int,
    trees: Sequence[Drafter] = (),
    batch_size: int = 1,
) -> Speed:
    """Time every prompt `repeats` times: target alone, each draft length, each drafter with a tree at its full depth.

    They take turns. One warm-up is not counted. `batch_size` prompts are decoded at once, the last ones with the first
    where they are too few. `draft_cost_ratio` is that of the chains. Raises ConfigError where the model decodes no
    batches (`fits_in_place`), and where no answer has two tokens.
    """
    _check_batches(model, batch_size)
    ways = _ways(drafter, lengths, trees)
    plain: list[_Timing] = []
    fast: list[list[_Timing]] = [[] for _ in ways]
    starts = range(0, len(rows), batch_size)
    batches = [[rows[(start + i) % len(rows)] for i in range(batch_size)] for start in starts] * repeats

    def run(batch: list[DistillRow], way: _Way | None) -> _Timing:
        own, length = (way.drafter, way.length) if way else (None, 0)
        prompts = [row.prompt_ids for row in batch]
        if batch_size == 1:
            return _timing(
                [decode(model, prompts[0], sampling, eos_token_ids, drafter=own, num_speculative_tokens=length)]
            )
        return _timing(
            decode_batch(model, prompts, sampling, eos_token_ids, drafter=own, num_speculative_tokens=length)
        )

    for way in (None, *ways):
        run(batches[0], way)
    for batch in track(batches, len(batches), f"timing, batch size {batch_size}", logger):
        plain.append(run(batch, None))
        for way, timings in zip(ways, fast, strict=True):
            timings.append(run(batch, way))
    if not _total(plain, "passes"):
        raise ConfigError(NOTHING_DRAFTED)
    step_seconds = _total(plain, "verify_seconds") / _total(plain, "passes")
    chains = [t for way, timings in zip(ways, fast, strict=True) if way.drafter.tree is None for t in timings]
    return Speed(
        hardware=hardware_name(model.device),
        device=model.device.type,
        num_threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        batch_size=batch_size,
        num_prompts=len({row.prompt_id for row in rows}),
        repeats=repeats,
        target_tokens_per_second=_total(plain, "tokens") / _total(plain, "seconds"),
        draft_cost_ratio=_draft_seconds(chains) / step_seconds,
        points=[_point(way, batches, timings, plain, step_seconds) for way, timings in zip(ways, fast, strict=True)],
    )
