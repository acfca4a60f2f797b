"""Owns what is said of several drafters together: which of them to serve, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdist.evaluation.summary import best_speed, drafted
from specdist.schema import EvalReport, GateDecision, SpeedPoint


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
    def in_engines(self) -> SpeedPoint | None:
        """Its fastest measured shape of those that vLLM serves: chains of draft models and Medusa heads."""
        if self.report.drafter_kind == "hydra" or self.report.speed is None:
            return None
        chains = [point for point in self.report.speed.points if point.num_tree_nodes is None]
        return max(chains, key=lambda point: point.speedup, default=None)


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
    timed = sorted(((d, point) for d in able if (point := best_speed(d.report))), key=lambda pair: -pair[1].speedup)
    if not timed:
        return _by_length(able)
    found = [_winner(*timed[0]), *_runner_up(timed), *_longest(able, timed[0][0]), *_engines(able, *timed[0])]
    return found + _left_out(drafters, able, [d for d, _ in timed])


def _drafted(point: SpeedPoint) -> str:
    return f"a {drafted(point)}" if point.num_tree_nodes else drafted(point)


def _times(point: SpeedPoint) -> str:
    low, high = point.speedup_interval
    return f"{point.speedup:.2f} times the speed of the target alone (95 % interval {low:.2f} to {high:.2f})"


def _winner(best: Judged, point: SpeedPoint) -> str:
    speed = best.report.speed
    place = f"On {speed.hardware}, {speed.dtype}, batch size {speed.batch_size}," if speed else ""
    if point.speedup_interval[0] > 1.0:
        return f"Serve {best.name} with {_drafted(point)}. {place} it was measured at {_times(point)}."
    return (
        f"Serve the target without a drafter. {place} the fastest, {best.name} with {_drafted(point)}, was measured at "
        f"{_times(point)}: a gain that chance could make, or none."
    )


def _runner_up(timed: Sequence[tuple[Judged, SpeedPoint]]) -> list[str]:
    if len(timed) < 2:
        return []
    (_, first), (second, other) = timed[:2]
    apart = other.speedup_interval[1] < first.speedup_interval[0]
    words = "the difference is beyond chance" if apart else "the intervals overlap, so their order may be chance"
    return [f"Next is {second.name} with {_drafted(other)} at {other.speedup:.2f} times: {words}."]


def _longest(able: Sequence[Judged], winner: Judged) -> list[str]:
    """Why the drafter that accepts most is not the fastest, where that is so."""
    longest = max(able, key=lambda d: d.length or 0.0)
    speed = longest.report.speed
    if longest is winner or speed is None or longest.length is None or longest.length <= (winner.length or 0.0):
        return []
    return [
        f"{longest.name} accepts more ({longest.length:.2f} tokens per step of the target against "
        f"{winner.length or 1.0:.2f}), but drafting one token costs {speed.draft_cost_ratio:.2f} of a step with it, "
        "which is more than that gains."
    ]


def _engines(able: Sequence[Judged], winner: Judged, point: SpeedPoint) -> list[str]:
    if point == winner.in_engines:
        return []
    served = [(d, chain) for d in able if (chain := d.in_engines)]
    here = "Hydra heads" if winner.report.drafter_kind == "hydra" else "Draft trees"
    if not served:
        return [f"{here} run in specdist's own decoder; of what vLLM serves nothing was timed."]
    best, chain = max(served, key=lambda pair: pair[1].speedup)
    return [
        f"{here} run in specdist's own decoder. Of what vLLM serves, {best.name} with {_drafted(chain)} is the "
        f"fastest: {_times(chain)}{'' if chain.speedup_interval[0] > 1.0 else ', no gain that is beyond chance'}."
    ]


def _left_out(drafters: Sequence[Judged], able: Sequence[Judged], timed: Sequence[Judged]) -> list[str]:
    said = []
    if rejected := [d.name for d in drafters if d not in able]:
        said.append(f"Not considered, since the gate or the report itself speaks against it: {', '.join(rejected)}.")
    if untimed := [d.name for d in able if d not in timed]:
        said.append(f"Not timed, so its speed is not known: {', '.join(untimed)}.")
    hardware = {(d.report.speed.hardware, d.report.speed.dtype) for d in timed if d.report.speed}
    if len(hardware) > 1:
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
