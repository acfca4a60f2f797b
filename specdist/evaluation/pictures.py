"""Owns the pictures of one report."""

from typing import Any

from specdist.evaluation.chart import (
    COLOURS,
    Picture,
    distances,
    draw_baseline,
    draw_points,
    draw_reference,
    length_errors,
    numbers,
    rate_intervals,
)
from specdist.schema import AcceptanceResult, EvalReport
from specdist.schema_costs import StepCosts
from specdist.schema_heads import DraftShape, HeadsReport


def draw_pictures(report: EvalReport) -> list[Picture]:
    """Draw what the report holds; a picture without numbers is left out."""
    drawers = (_by_position, _by_draft_length, _by_speed, _by_batch_size, _by_checkpoint, _by_domain)
    return [picture for draw in drawers if (picture := draw(report)) is not None]


def _by_position(report: EvalReport) -> Picture | None:
    results = [r for r in report.acceptance if r.num_speculative_tokens == report.num_speculative_tokens]
    if not results:
        return None
    labelled = [*((r.setting, r) for r in results), ("untrained", report.untrained)]
    top = max(rate for _, r in labelled for rate in r.summary.acceptance_at_position)

    def draw(axes: Any) -> None:
        for i, (label, result) in enumerate(labelled):
            rates = result.summary.acceptance_at_position
            shift = 0.06 * (i - (len(labelled) - 1) / 2)  # side by side, so that error bars do not hide each other
            positions = [k + 1 + shift for k in range(len(rates))]
            errors = distances(rates, rate_intervals(result))
            if result is report.untrained:
                draw_reference(axes, positions, rates, label, yerr=errors)
            else:
                draw_points(axes, positions, rates, label, i, yerr=errors)
        axes.set_xticks(range(1, report.num_speculative_tokens + 1))
        axes.set_ylim(-0.03 * max(top, 0.1), min(1.05, 1.25 * max(top, 0.1)))
        axes.set_xlabel("position in the draft (token)")
        axes.set_ylabel("accepted (share of target steps)")

    said = "; ".join(f"{label} {numbers(r.summary.acceptance_at_position)}" for label, r in labelled)
    title = f"Acceptance by position, draft length γ = {report.num_speculative_tokens}"
    return Picture(title, f"Share of target steps that accept position 1, 2 and so on: {said}.", draw)


def _by_draft_length(report: EvalReport) -> Picture | None:
    groups: dict[str, list[AcceptanceResult]] = {}
    for result in sorted(report.acceptance, key=lambda r: r.num_speculative_tokens):
        groups.setdefault(result.setting, []).append(result)
    if not groups:
        return None
    lengths = sorted({r.num_speculative_tokens for r in report.acceptance})

    def draw(axes: Any) -> None:
        for i, (setting, results) in enumerate(groups.items()):
            x, summaries = [r.num_speculative_tokens for r in results], [r.summary for r in results]
            values = [summary.mean_accepted_length for summary in summaries]
            draw_points(axes, x, values, setting, i, yerr=length_errors(summaries))
        x, base = [report.untrained.num_speculative_tokens], report.untrained.summary
        draw_reference(axes, x, [base.mean_accepted_length], "untrained", yerr=length_errors([base]), linestyle="none")
        draw_baseline(axes.axhline)
        axes.set_xticks(lengths)
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("τ (tokens per target step)")

    said = "; ".join(
        f"{setting} {numbers([r.summary.mean_accepted_length for r in results])}" for setting, results in groups.items()
    )
    description = f"τ at draft length {', '.join(map(str, lengths))}: {said}. The target alone makes 1."
    return Picture("Tokens per target step against draft length", description, draw)


def _by_speed(report: EvalReport) -> Picture | None:
    chains = [p for p in report.speed.points if p.num_tree_nodes is None] if report.speed else []
    if not chains:
        return None
    points = sorted(chains, key=lambda p: p.num_speculative_tokens)
    lengths, speedups = [p.num_speculative_tokens for p in points], [p.speedup for p in points]

    def draw(axes: Any) -> None:
        draw_points(axes, lengths, speedups, "measured", yerr=distances(speedups, [p.speedup_interval for p in points]))
        draw_reference(axes, lengths, [p.predicted_speedup for p in points], "predicted")
        draw_baseline(axes.axhline)
        axes.set_xticks(lengths)
        axes.margins(y=0.1)
        axes.set_xlabel("draft length γ (tokens)")
        axes.set_ylabel("speed (target alone = 1)")

    description = f"Speed over the target alone at draft length {', '.join(map(str, lengths))}: {numbers(speedups)}."
    return Picture("Measured speed", description, draw)


def _by_batch_size(report: EvalReport) -> Picture | None:
    """Speed of the chain that the gate judges, at each batch size that was timed."""
    points = {
        speed.batch_size: point
        for speed in report.speeds
        for point in speed.points
        if point.num_tree_nodes is None and point.num_speculative_tokens == report.num_speculative_tokens
    }
    if len(points) < 2:
        return None
    sizes, speedups = list(points), [point.speedup for point in points.values()]

    def draw(axes: Any) -> None:
        places = range(len(sizes))  # sizes grow by factors: evenly spaced they can be read
        errors = distances(speedups, [point.speedup_interval for point in points.values()])
        draw_points(axes, places, speedups, "measured", yerr=errors)
        draw_baseline(axes.axhline)
        axes.set_xticks(places, list(map(str, sizes)))
        axes.margins(y=0.1)
        axes.set_xlabel("batch size (texts decoded at once)")
        axes.set_ylabel("speed (target alone = 1)")

    description = (
        f"Speed over the target alone at γ = {report.num_speculative_tokens} and batch size "
        f"{', '.join(map(str, sizes))}: {numbers(speedups)}."
    )
    return Picture("Measured speed against batch size", description, draw)


def _by_checkpoint(report: EvalReport) -> Picture | None:
    if len(report.checkpoints) < 2:
        return None
    points = sorted(report.checkpoints, key=lambda p: p.step)
    steps, values = [p.step for p in points], [p.summary.mean_accepted_length for p in points]

    def draw(axes: Any) -> None:
        draw_points(axes, steps, values, "checkpoint", yerr=length_errors([p.summary for p in points]))
        if report.checkpoint_step in steps:
            y, ring = values[steps.index(report.checkpoint_step)], {"markersize": 12, "markerfacecolor": "none"}
            axes.plot([report.checkpoint_step], [y], "o", color=COLOURS[1], label="this drafter", **ring)
        draw_baseline(axes.axhline)
        axes.set_xlabel("training step (0 = untrained)")
        axes.set_ylabel("τ (tokens per target step)")

    said = ", ".join(f"{value:.2f} at step {step}" for step, value in zip(steps, values, strict=True))
    return Picture("Acceptance by checkpoint", f"τ over training: {said}.", draw)


def _by_domain(report: EvalReport) -> Picture | None:
    primary = report.primary
    if primary is None or not primary.domains:
        return None
    domains = sorted(primary.domains.items(), key=lambda item: item[1].mean_accepted_length)
    summaries, rows = [summary for _, summary in domains], list(range(len(domains)))
    values = [summary.mean_accepted_length for summary in summaries]
    before = {i: s for i, (name, _) in enumerate(domains) if (s := report.untrained.domains.get(name))}

    def draw(axes: Any) -> None:
        draw_points(axes, values, rows, "this drafter", xerr=length_errors(summaries), linestyle="none")
        errors = length_errors(list(before.values()))
        x = [summary.mean_accepted_length for summary in before.values()]
        draw_reference(axes, x, list(before), "untrained", xerr=errors, linestyle="none")
        draw_baseline(axes.axvline)
        axes.set_yticks(rows, [f"{name[:28]} ({summary.num_prompts})" for name, summary in domains])
        axes.set_ylim(-0.6, len(domains) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("τ (tokens per target step)")
        axes.set_ylabel("domain (prompts)")

    said = ", ".join(f"{name} {value:.2f}" for (name, _), value in zip(domains, values, strict=True))
    title = f"Acceptance by domain, {primary.setting}"
    return Picture(title, f"τ by domain: {said}.", draw, height=1.9 + 0.36 * len(domains))


def draw_shapes(heads: HeadsReport) -> Picture:
    """τ of chains and trees against the number of drafted tokens that the target verifies."""

    def draw(axes: Any) -> None:
        for i, kind in enumerate(("tree", "chain")):
            shapes = [shape for shape in heads.shapes if shape.kind == kind]
            values = [shape.mean_accepted_length for shape in shapes]
            errors = distances(values, [shape.mean_accepted_length_interval for shape in shapes])
            draw_points(axes, [shape.num_nodes for shape in shapes], values, kind, i, yerr=errors)
        draw_baseline(axes.axhline)
        sizes = sorted({shape.num_nodes for shape in heads.shapes if shape.kind == "tree"})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_xlabel("drafted tokens per step (nodes)")
        axes.set_ylabel("τ (tokens per target step)")

    def said(shape: DraftShape) -> str:
        return f"{shape.kind} of {shape.num_nodes} {shape.mean_accepted_length:.2f}"

    description = f"τ by drafted tokens: {', '.join(map(said, heads.shapes))}. The target alone makes 1."
    return Picture("Tokens per target step of chains and trees", description, draw)


def draw_costs(costs: StepCosts) -> Picture:
    """Cost of a verified block against its tokens, a curve for each batch size, and that of drafting chains."""
    chains = [cost for cost in costs.draft if cost.kind == "chain"]
    sizes = costs.verify[0].num_tokens

    def draw(axes: Any) -> None:
        for i, curve in enumerate(costs.verify):
            draw_points(axes, curve.num_tokens, curve.ratios, f"verifying, batch {curve.batch_size}", i)
        if chains:
            draw_reference(
                axes, [cost.num_tokens for cost in chains], [cost.ratio for cost in chains], "drafting, batch 1"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("new tokens of each text")
        axes.set_ylabel("cost (target steps of one token)")

    said = [f"batch size {curve.batch_size} {numbers(curve.ratios)}" for curve in costs.verify]
    said += [f"drafting {cost.num_tokens} tokens {cost.ratio:.2f}" for cost in chains]
    description = f"Cost of a target pass over {', '.join(map(str, sizes))} tokens: {'; '.join(said)}."
    return Picture("What verifying and drafting cost", description, draw)
