"""Owns wall-clock measurement: speculative decoding against the target alone, interleaved, at batch size 1."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist import metrics
from specdist.decoding.loop import DecodeResult, decode
from specdist.drafters.base import Drafter
from specdist.progress import track
from specdist.schema import DistillRow, SamplingSpec, Speed, SpeedPoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Timing:
    """One decode: output tokens, all seconds, and the seconds and number of its parts."""

    tokens: int
    seconds: float
    steps: int
    draft_tokens: int
    accepted_tokens: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class _Way:
    """A way to draft that is timed: how many tokens a block has, or levels of the drafter's tree."""

    drafter: Drafter
    length: int


def _timing(result: DecodeResult) -> _Timing:
    return _Timing(
        len(result.completion_ids),
        result.prefill_seconds + result.draft_seconds + result.verify_seconds,
        len(result.steps),
        sum(step.drafted for step in result.steps),
        sum(step.accepted for step in result.steps),
        result.draft_seconds,
        result.verify_seconds,
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


def _point(way: _Way, fast: list[_Timing], plain: list[_Timing], step_seconds: float) -> SpeedPoint:
    # Speed is tokens per second on both sides: in half precision the two texts may part at a tie and end elsewhere.
    rates = [[t.tokens, t.seconds, p.tokens, p.seconds] for t, p in zip(fast, plain, strict=True)]
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
            _total(fast, "draft_seconds") / max(1.0, _total(fast, "draft_tokens")) / step_seconds,
            _total(fast, "verify_seconds") / _total(fast, "steps") / step_seconds,
        ),
        num_tree_nodes=way.drafter.tree.num_nodes if way.drafter.tree else None,
    )


def _ways(drafter: Drafter, lengths: Sequence[int], trees: Sequence[Drafter]) -> list[_Way]:
    longest = drafter.max_draft_tokens
    chains = [_Way(drafter, n) for n in lengths if longest is None or n <= longest]
    return chains + [_Way(tree, tree.tree.depth) for tree in trees if tree.tree]


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
) -> Speed:
    """Time every prompt `repeats` times: target alone, each draft length, each drafter with a tree at its full depth.

    They take turns. One warm-up is not counted. `draft_cost_ratio` is that of the chains.
    """
    ways = _ways(drafter, lengths, trees)
    plain: list[_Timing] = []
    fast: list[list[_Timing]] = [[] for _ in ways]
    order = [row for _ in range(repeats) for row in rows]

    def run(row: DistillRow, way: _Way | None) -> _Timing:
        own, length = (way.drafter, way.length) if way else (None, 0)
        return _timing(
            decode(model, row.prompt_ids, sampling, eos_token_ids, drafter=own, num_speculative_tokens=length)
        )

    for way in (None, *ways):
        run(rows[0], way)
    for row in track(order, len(order), "timing", logger):
        plain.append(run(row, None))
        for way, timings in zip(ways, fast, strict=True):
            timings.append(run(row, way))
    step_seconds = _total(plain, "verify_seconds") / _total(plain, "steps")
    chains = [t for way, timings in zip(ways, fast, strict=True) if way.drafter.tree is None for t in timings]
    return Speed(
        hardware=hardware_name(model.device),
        device=model.device.type,
        num_threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        batch_size=1,
        num_prompts=len(rows),
        repeats=repeats,
        target_tokens_per_second=_total(plain, "tokens") / _total(plain, "seconds"),
        draft_cost_ratio=_total(chains, "draft_seconds") / _total(chains, "draft_tokens") / step_seconds,
        points=[_point(way, timings, plain, step_seconds) for way, timings in zip(ways, fast, strict=True)],
    )
