"""Owns what a fit says: the field's rules of thumb, the speed-up to expect, and prediction beside measurement, as text.

Predictions take acceptances as independent: τ = (1 − α^(γ+1)) / (1 − α), speed-up = τ / (γc + v) (metrics.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdist.evaluation.fit import MAX_LENGTH, Fit
from specdist.metrics import (
    break_even_acceptance_rate,
    independent_mean_accepted_length,
    pooled_length,
    predicted_speedup,
)
from specdist.schema import EvalReport, Speed

ACCEPTANCE_RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = range(1, MAX_LENGTH + 1)
MIN_TIMES_FASTER, MAX_SIZE_RATIO, USUAL_RATE, USUAL_SPEEDUP = 5.0, 1 / 5, 0.7, 2.0


@dataclass(frozen=True)
class Rule:
    """One rule of thumb: what was found, what the field asks, and whether that is met."""

    name: str
    found: str
    asked: str
    ok: bool


@dataclass(frozen=True)
class Prediction:
    """The table's row of one draft length: `speedups` at each of ACCEPTANCE_RATES; None: no rate gains anything."""

    num_speculative_tokens: int
    verify_cost_ratio: float
    break_even_acceptance_rate: float | None
    speedups: list[float]


def predictions(fit: Fit, *, measured_verify: bool) -> list[Prediction]:
    """What to expect at each draft length; without `measured_verify` a verified block costs one step, as in theory."""
    rows = []
    for gamma in LENGTHS:
        c, v = fit.draft_cost_ratio, fit.verify_cost_ratios[gamma - 1] if measured_verify else 1.0
        speedups = [
            predicted_speedup(independent_mean_accepted_length(rate, gamma), gamma, c, v) for rate in ACCEPTANCE_RATES
        ]
        rows.append(Prediction(gamma, v, break_even_acceptance_rate(gamma, c, v), speedups))
    return rows


def best_lengths(rows: Sequence[Prediction]) -> list[int | None]:
    """The draft length with the highest predicted speed-up at each of ACCEPTANCE_RATES; None where none gains."""
    best = [max(rows, key=lambda row: row.speedups[i]) for i in range(len(ACCEPTANCE_RATES))]
    return [row.num_speculative_tokens if row.speedups[i] > 1 else None for i, row in enumerate(best)]


def rules(fit: Fit) -> list[Rule]:
    """The field's rules of thumb on this fit."""
    faster, size = 1 / fit.draft_cost_ratio, fit.draft_parameters / fit.target_parameters
    at = ACCEPTANCE_RATES.index(USUAL_RATE)
    best = max(predictions(fit, measured_verify=True), key=lambda row: row.speedups[at])
    vocabulary = f"same tokenizer, {fit.num_tokens} tokens"
    if fit.draft_vocab_size != fit.target_vocab_size:
        vocabulary += f"; padded {fit.draft_vocab_size} rows become the target's {fit.target_vocab_size}"
    return [
        Rule(
            "speed",
            f"{faster:.1f} × as fast as the target (c = {fit.draft_cost_ratio:.3f})",
            f"at least {MIN_TIMES_FASTER:g} ×",
            faster >= MIN_TIMES_FASTER,
        ),
        Rule(
            "size",
            f"{fit.draft_parameters / 1e6:.1f} M of {fit.target_parameters / 1e6:.1f} M parameters, 1/{1 / size:.1f}",
            "at most 1/5",
            size <= MAX_SIZE_RATIO,
        ),
        Rule(
            f"gain at {USUAL_RATE:.0%}",
            f"{best.speedups[at]:.2f} × predicted, at γ = {best.num_speculative_tokens}",
            f"{USUAL_SPEEDUP:g} ×",
            best.speedups[at] >= USUAL_SPEEDUP,
        ),
        Rule("vocabulary", vocabulary, "same tokenizer", True),  # another one is refused before anything is measured
    ]


def fit_json(fit: Fit) -> dict[str, Any]:
    """The fit with all that its table says, as plain values."""
    return {
        **fit.to_json(),
        "rules": [asdict(rule) for rule in rules(fit)],
        "acceptance_rates": list(ACCEPTANCE_RATES),
        "predictions": [asdict(row) for row in predictions(fit, measured_verify=True)],
        "predictions_verify_cost_1": [asdict(row) for row in predictions(fit, measured_verify=False)],
    }


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Rows of cells as lines of equal columns, the first `left` columns flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _table(rows: Sequence[Prediction]) -> list[str]:
    cells = [["γ", "v", "break-even α", *(f"α={rate:g}" for rate in ACCEPTANCE_RATES)]]
    for row in rows:
        even = row.break_even_acceptance_rate
        numbers = [f"{row.verify_cost_ratio:.2f}", "never" if even is None else f"{even:.2f}"]
        cells.append([str(row.num_speculative_tokens), *numbers, *(f"{value:.2f}" for value in row.speedups)])
    cells.append(["best γ", "", "", *("none" if best is None else str(best) for best in best_lengths(rows))])
    return aligned(cells)


def fit_lines(fit: Fit) -> list[str]:
    """The fit as text: rules of thumb with ok or poor, then the predicted speed-up by draft length and acceptance."""
    checks = [[rule.name, rule.found, "ok" if rule.ok else "poor", f"rule: {rule.asked}"] for rule in rules(fit)]
    return [
        f"fit of a draft ({fit.draft_model}) to {fit.target_model}",
        f"{fit.dtype}, batch size 1, on {fit.hardware}, {fit.num_threads} threads; "
        f"a step of the target takes {1e3 * fit.target_step_seconds:.1f} ms",
        *aligned(checks, left=4),
        "predicted speed-up τ / (γc + v), τ = (1 − α^(γ+1)) / (1 − α), v measured: a pass over γ + 1 tokens, in steps",
        *_table(predictions(fit, measured_verify=True)),
        "the same with v = 1: a device with arithmetic to spare",
        *_table(predictions(fit, measured_verify=False)),
    ]


def comparison_lines(fit: Fit, report: EvalReport, speed: Speed, prompt_ids: set[str]) -> list[str]:
    """Predicted beside measured speed-up, by draft length.

    Predicted: τ and the tokens drafted per step as replayed on the timed prompts (fewer than γ where a text ends), with
    the fit's costs, all known before a token was decoded. Measured times include reading the prompt, on both sides.
    """
    cells = [["γ", "drafted/step", "τ replayed", "τ decoded", "predicted", "measured", "95 %"]]
    for point in speed.points:
        gamma = point.num_speculative_tokens
        result = report.result(report.primary_setting, gamma)
        if result is None or gamma > MAX_LENGTH:
            continue
        prompts = [p for p in result.prompts if p.prompt_id in prompt_ids]
        drafted = sum(p.num_draft_tokens for p in prompts) / sum(p.num_drafts for p in prompts)
        tau = pooled_length(prompts)
        cost = drafted * fit.draft_cost_ratio + fit.verify_cost_ratios[gamma - 1]
        low, high = point.speedup_interval
        numbers = (drafted, tau, point.mean_accepted_length, tau / cost, point.speedup)
        cells.append([str(gamma), *(f"{value:.2f}" for value in numbers), f"{low:.2f} to {high:.2f}"])
    return [
        f"predicted and measured speed-up, {speed.num_prompts} prompts of the evaluation, each {speed.repeats} times",
        *aligned(cells),
    ]
