"""Holds a run of vLLM with one drafter against its run without speculation and against what specdist measured.

Owns what is compared and the table that shows it. Imported in vLLM's environment, as check_vllm.py is.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdist import metrics
from specdist.schema import AcceptanceResult, EvalReport, PromptCounts

# Two runs may part where the two best tokens are this close, since another block size rounds differently. In float32
# it is the gap below which specdist's own reports call a divergence a near-tie, far above rounding. bfloat16 has 8
# significant bits: logits of 16 to 32 lie 0.125 apart, so this is two roundings.
NEAR_TIE_LOGIT_GAP = {"float32": 0.05, "bfloat16": 0.25}
# Of the mean acceptance length, relative to ours. Two things make an honest difference: vLLM also counts drafts that it
# accepts past the end of a text, up to γ per text, and a near-tie gives the rest of a text other words.
MAX_LENGTH_DIFFERENCE = 0.10

Row = dict[str, Any]  # of a dataset, or an engine's answer to it


@dataclass(frozen=True)
class Drafter:
    """A drafter on disk, as an engine gets it (`path` stays the champion link), and its own measurement."""

    name: str
    path: Path
    method: str
    report: EvalReport
    acceptance: AcceptanceResult


@dataclass(frozen=True)
class Difference:
    """Where speculative output left the plain one; `logit_gap` None where its token was not among the best there."""

    prompt_id: str
    position: int
    logit_gap: float | None


@dataclass
class Outcome:
    """What vLLM did with one drafter, beside what was measured; counters are sums over the prompts."""

    drafter: str
    method: str
    num_speculative_tokens: int
    num_prompts: int
    num_identical: int
    near_ties: list[Difference]
    different: list[Difference]
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    mean_acceptance_length: float
    measured_acceptance_rate: float
    measured_mean_accepted_length: float
    same_text: int
    same_text_drafts: float
    same_text_measured_drafts: float
    same_text_at_position: list[float]  # accepted, of each position of a draft
    same_text_measured_at_position: list[float]
    problems: list[str] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def relative_difference(self) -> float:
        return self.mean_acceptance_length / self.measured_mean_accepted_length - 1.0

    def to_json(self) -> dict[str, Any]:
        rates = {"acceptance_rate": self.acceptance_rate, "relative_difference": self.relative_difference}
        return {**asdict(self), **rates}


def first_difference(prompt_id: str, plain: Row, other: Row) -> Difference | None:
    """Where `other` leaves the `plain` output, and by how much the target preferred its own token there."""
    ours, theirs = plain["token_ids"], other["token_ids"]
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    gap: float | None = None
    if position < min(len(ours), len(theirs)):
        best = plain["best"][position]  # holds the chosen token and the best few
        if (logprob := best.get(str(theirs[position]))) is not None:
            gap = best[str(ours[position])] - logprob
    return Difference(prompt_id, position, gap)


def compare(drafter: Drafter, rows: Sequence[Row], plain: Sequence[Row], other: Sequence[Row], dtype: str) -> Outcome:
    """Judge one drafter's run against the run without speculation and the drafter's report."""
    measured = {p.prompt_id: p for p in drafter.acceptance.prompts}
    ours = [measured[row["prompt_id"]] for row in rows]
    theirs = [_counts(row, answer) for row, answer in zip(rows, other, strict=True)]
    parted = [first_difference(r["prompt_id"], p, o) for r, p, o in zip(rows, plain, other, strict=True)]
    differences = [d for d in parted if d is not None]
    near = [d for d in differences if d.logit_gap is not None and d.logit_gap < NEAR_TIE_LOGIT_GAP[dtype]]
    same = [i for i, row in enumerate(rows) if row["completion_ids"] == other[i]["token_ids"]]
    drafts = sum(c.num_drafts for c in theirs)
    drafted = sum(c.num_draft_tokens for c in ours)
    outcome = Outcome(
        drafter=drafter.name,
        method=drafter.method,
        num_speculative_tokens=drafter.acceptance.num_speculative_tokens,
        num_prompts=len(rows),
        num_identical=len(rows) - len(differences),
        near_ties=near,
        different=[d for d in differences if d not in near],
        num_drafts=drafts,
        num_draft_tokens=sum(c.num_draft_tokens for c in theirs),
        num_accepted_tokens=sum(c.num_accepted_tokens for c in theirs),
        mean_acceptance_length=metrics.pooled_length(theirs) if drafts else 1.0,
        measured_acceptance_rate=sum(c.num_accepted_tokens for c in ours) / drafted if drafted else 0.0,
        measured_mean_accepted_length=metrics.pooled_length(ours),
        same_text=len(same),
        same_text_drafts=sum(theirs[i].num_drafts for i in same),
        same_text_measured_drafts=sum(ours[i].num_drafts for i in same),
        same_text_at_position=_at_position([theirs[i] for i in same]),
        same_text_measured_at_position=_at_position([ours[i] for i in same]),
    )
    outcome.problems = _problems(outcome)
    return outcome


def _counts(row: Row, answer: Row) -> PromptCounts:
    accepted = list(map(float, answer["accepted_at_position"]))
    drafts, drafted = float(answer["num_drafts"]), float(answer["num_draft_tokens"])
    return PromptCounts(row["prompt_id"], row["domain"], drafts, drafted, accepted)


def _at_position(counts: Sequence[PromptCounts]) -> list[float]:
    return [sum(values) for values in zip(*(c.accepted_at_position for c in counts), strict=True)]


def _problems(outcome: Outcome) -> list[str]:
    problems = []
    if outcome.different:
        problems.append(f"{len(outcome.different)} outputs leave the target's own, and not at a near-tie")
    if not outcome.num_draft_tokens:
        problems.append("nothing was drafted")
    elif not outcome.num_accepted_tokens:
        problems.append("no drafted token was accepted")
    if abs(outcome.relative_difference) > MAX_LENGTH_DIFFERENCE:
        problems.append(f"mean acceptance length differs by {outcome.relative_difference:+.1%}")
    pairs = zip(outcome.same_text_at_position, outcome.same_text_measured_at_position, strict=True)
    for position, (theirs, ours) in enumerate(pairs, 1):
        # The last step of a text, and no other, may accept drafts past its end, which vLLM counts and we do not
        if not 0 <= theirs - ours <= outcome.same_text:
            problems.append(
                f"on the same texts position {position} accepted {theirs:.0f} drafts, {ours:.0f} by specdist; at most "
                f"{outcome.same_text} more are explained by the ends of texts"
            )
    return problems


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes side by side, one column each."""
    lines: list[tuple[str, Callable[[Outcome], str]]] = [
        ("", lambda o: o.drafter),
        ("vLLM's method, draft length", lambda o: f"{o.method}, {o.num_speculative_tokens}"),
        ("greedy tokens as without speculation", lambda o: f"{o.num_identical} of {o.num_prompts}"),
        ("  parted at a near-tie", lambda o: _gaps(o.near_ties)),
        ("  different", lambda o: _gaps(o.different)),
        ("accepted / drafted tokens", lambda o: f"{o.num_accepted_tokens:.0f} / {o.num_draft_tokens:.0f}"),
        ("acceptance rate, vLLM", lambda o: f"{o.acceptance_rate:.1%}"),
        ("acceptance rate, specdist", lambda o: f"{o.measured_acceptance_rate:.1%}"),
        ("mean acceptance length, vLLM", lambda o: f"{o.mean_acceptance_length:.3f}"),
        ("mean acceptance length, specdist", lambda o: f"{o.measured_mean_accepted_length:.3f}"),
        ("  difference", lambda o: f"{o.relative_difference:+.1%}"),
        ("text as in specdist's dataset", lambda o: f"{o.same_text} of {o.num_prompts}"),
        ("  verify steps there, vLLM", lambda o: f"{o.same_text_drafts:.0f}"),
        ("  verify steps there, specdist", lambda o: f"{o.same_text_measured_drafts:.0f}"),
        ("  accepted there by position, vLLM", lambda o: _whole(o.same_text_at_position)),
        ("  accepted there by position, specdist", lambda o: _whole(o.same_text_measured_at_position)),
        ("result", lambda o: "failed" if o.problems else "passed"),
    ]
    cells = [[label, *(show(o) for o in outcomes)] for label, show in lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _whole(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _gaps(found: Sequence[Difference]) -> str:
    gaps = ["over that of the best" if d.logit_gap is None else f"{d.logit_gap:.3f}" for d in found]
    return f"{len(found)}" + (f" (logit gap {', '.join(gaps)})" if gaps else "")
