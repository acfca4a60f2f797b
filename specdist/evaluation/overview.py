"""Owns what is said of several drafters together: which of them to serve, and why.

They are ranked by what was timed at one batch size, which is said; those that were not timed at it are left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdist.evaluation.summary import drafted
from specdist.schema import EvalReport, GateDecision, Speed, SpeedPoint


@dataclass(frozen=True)
class Judged:
    """A drafter by its name, what was measured on it, and the gate's verdict where there is one."""

    name: str
    report: EvalReport
    decision: GateDecision | None = None

    @property
    def verdict(self) -> str:
        return self.decision.verdict if self.decision else "not judged"

    @property
    def may_serve(self) -> bool:
        """Whether nothing speaks against it: neither the gate nor the report itself."""
        return self.verdict != "reject" and not self.report.invalid_reasons

    @property
    def length(self) -> float | None:
        """τ at its own primary setting and draft length."""
        return self.report.primary.summary.mean_accepted_length if self.report.primary else None

    @property
    def batch_sizes(self) -> set[int]:
        """The batch sizes that it was timed at."""
        return {speed.batch_size for speed in self.report.speeds if speed.points}


@dataclass(frozen=True)
class _Timed:
    """A drafter with what was timed at the batch size that all are ranked at, and its fastest point there."""

    drafter: Judged
    speed: Speed
    point: SpeedPoint

    @property
    def place(self) -> tuple[str, str]:
        return self.speed.hardware, self.speed.dtype

    @property
    def in_engines(self) -> SpeedPoint | None:
        """Its fastest measured shape of those that vLLM serves: chains of draft models and Medusa heads."""
        if self.drafter.report.drafter_kind == "hydra":
            return None
        return max((p for p in self.speed.points if p.num_tree_nodes is None), key=_speedup, default=None)


def _speedup(point: SpeedPoint) -> float:
    return point.speedup


def _ranked(able: Sequence[Judged]) -> list[_Timed]:
    """Those timed at the batch size that most were timed at, of several such the smallest; the fastest first."""
    sizes = Counter(size for drafter in able for size in drafter.batch_sizes)
    common = max(sizes, key=lambda size: (sizes[size], -size), default=None)
    speeds = [(d, speed) for d in able for speed in d.report.speeds if speed.points and speed.batch_size == common]
    timed = [_Timed(drafter, speed, max(speed.points, key=_speedup)) for drafter, speed in speeds]
    return sorted(timed, key=lambda one: -one.point.speedup)


def obstacle(drafters: Sequence[Judged]) -> str | None:
    """Why they cannot be ranked, in words; None where they can."""
    reports = [drafter.report for drafter in drafters]
    if any(report.target != reports[0].target for report in reports):
        targets = ", ".join(f"{d.name} of {d.report.target.model_id}" for d in drafters)
        return f"These drafters belong to different targets ({targets}), so none is better than another."
    texts = {report.primary.texts_sha256 for report in reports if report.primary} - {None}
    if len({report.eval_prompts_sha256 for report in reports}) > 1 or len(texts) > 1:
        return (
            "These drafters were measured on other prompts, or on other answers to them (length limit, sampling, "
            "system prompt), so none is better than another: evaluate them alike."
        )
    return None


def recommendation(drafters: Sequence[Judged]) -> list[str]:
    """Which drafter to serve and why, in sentences that need no knowledge of the code.

    By measured speed over the target alone; by τ where nothing was timed. What the gate rejected is left out.
    """
    if reason := obstacle(drafters):
        return [reason]
    able = [drafter for drafter in drafters if drafter.may_serve]
    if not able:
        return ["None of them may serve: each was rejected, or its report may not be judged."]
    if not (timed := _ranked(able)):
        return _by_length(able)
    found = [_winner(timed[0]), *_runner_up(timed), *_longest(timed), *_engines(timed)]
    return found + _left_out(drafters, able, timed)


def _drafted(point: SpeedPoint) -> str:
    return f"a {drafted(point)}" if point.num_tree_nodes else drafted(point)


def _times(point: SpeedPoint) -> str:
    low, high = point.speedup_interval
    return f"{point.speedup:.2f} times the speed of the target alone (95 % interval {low:.2f} to {high:.2f})"


def _winner(best: _Timed) -> str:
    name, point = best.drafter.name, best.point
    place = f"On {best.speed.hardware}, {best.speed.dtype}, batch size {best.speed.batch_size},"
    if point.speedup_interval[0] > 1.0:
        return f"Serve {name} with {_drafted(point)}. {place} it was measured at {_times(point)}."
    return (
        f"Serve the target without a drafter. {place} the fastest, {name} with {_drafted(point)}, was measured at "
        f"{_times(point)}: a gain that chance could make, or none."
    )


def _runner_up(timed: Sequence[_Timed]) -> list[str]:
    if len(timed) < 2:
        return []
    first, second = timed[:2]
    words = "the intervals overlap, so their order may be chance"
    if first.place != second.place:
        words = "timed elsewhere, so their order says little"
    elif second.point.speedup_interval[1] < first.point.speedup_interval[0]:
        words = "the difference is beyond chance"
    point = second.point
    return [f"Next is {second.drafter.name} with {_drafted(point)} at {point.speedup:.2f} times: {words}."]


def _longest(timed: Sequence[_Timed]) -> list[str]:
    """That the shape that accepts most is not the fastest, where that is so, and how long its steps took."""
    winner, longest = timed[0], max(timed, key=lambda one: one.point.mean_accepted_length)
    if longest.point.mean_accepted_length <= winner.point.mean_accepted_length:
        return []
    lengths = [one.point.mean_accepted_length for one in (longest, winner)]
    steps = [one.point.mean_accepted_length / one.point.speedup for one in (longest, winner)]
    return [
        f"{longest.drafter.name} with {_drafted(longest.point)} accepts more ({lengths[0]:.2f} tokens per step against "
        f"{lengths[1]:.2f}), but a step with it took about as long as the target alone needs for {steps[0]:.2f} "
        f"tokens, against {steps[1]:.2f}."
    ]


def _engines(timed: Sequence[_Timed]) -> list[str]:
    winner = timed[0]
    if winner.point == winner.in_engines:
        return []
    served = [(one.drafter, chain) for one in timed if (chain := one.in_engines)]
    here = "Hydra heads" if winner.drafter.report.drafter_kind == "hydra" else "Draft trees"
    if not served:
        return [f"{here} run in specdist's own decoder; of what vLLM serves nothing was timed."]
    best, chain = max(served, key=lambda pair: pair[1].speedup)
    return [
        f"{here} run in specdist's own decoder. Of what vLLM serves, {best.name} with {_drafted(chain)} is the "
        f"fastest: {_times(chain)}{'' if chain.speedup_interval[0] > 1.0 else ', no gain that is beyond chance'}."
    ]


def _left_out(drafters: Sequence[Judged], able: Sequence[Judged], timed: Sequence[_Timed]) -> list[str]:
    size = timed[0].speed.batch_size

    def names(wanted: Callable[[Judged], bool]) -> str:
        return ", ".join(drafter.name for drafter in drafters if wanted(drafter))

    said = []
    if rejected := names(lambda d: d not in able):
        said.append(f"Not considered, since the gate or the report itself speaks against it: {rejected}.")
    if untimed := names(lambda d: d in able and not d.batch_sizes):
        said.append(f"Not timed, so its speed is not known: {untimed}.")
    if elsewhere := names(lambda d: d in able and bool(d.batch_sizes) and size not in d.batch_sizes):
        said.append(f"Not timed at batch size {size}, so not ranked with the others: {elsewhere}.")
    if len({one.place for one in timed}) > 1:
        said.append("They were not all timed on the same hardware in the same dtype, so repeat that before you decide.")
    return said


def _by_length(able: Sequence[Judged]) -> list[str]:
    known = [d for d in able if d.length is not None]
    if not known:
        return ["Neither speed nor acceptance was measured, so nothing can be recommended."]
    best = max(known, key=lambda d: d.length or 0.0)
    return [
        f"Speed was not measured. {best.name} gives the most tokens per step of the target, {best.length:.2f}; whether "
        "that is faster depends on what drafting costs, so time it before you serve it."
    ]
