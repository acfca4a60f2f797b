"""Owns what the page of a report says: sentences, pictures and tables, one below the other."""

from collections.abc import Sequence
from html import escape
from statistics import fmean

from specdist.evaluation.page_costs import costs_section
from specdist.evaluation.page_heads import heads_section
from specdist.evaluation.page_parts import bounds, bullets, document, figures, section, table
from specdist.evaluation.pictures import draw_pictures
from specdist.evaluation.summary import best_speed, drafted, gain_over_untrained, mispredicted, sentences
from specdist.metrics import by_context
from specdist.schema import (
    AcceptanceResult,
    AcceptanceSummary,
    Certification,
    EvalReport,
    GateDecision,
    Speed,
    SpeedPoint,
)

_KINDS = {"draft_model": "Draft model", "medusa": "Medusa heads", "hydra": "Hydra heads"}

_WORDS = {
    "Target": "the model that is served. It checks every drafted token; the drafter only proposes.",
    "Step of the target": "one forward pass that checks a block of drafted tokens and adds one token of its own.",
    "Draft length γ": "how many tokens are drafted per step.",
    "Acceptance rate": "accepted / drafted tokens. The target's own token is not counted.",
    "τ, mean accepted length": "tokens per step of the target, its own token included: 1 + accepted / steps. "
    "More is better; the target alone has 1, and γ + 1 is the most there can be.",
    "Acceptance at position i": "share of steps that accept the drafted tokens 1 to i.",
    "Speed": "measured wall clock over that of the target alone, on the same prompts and hardware. "
    "Predicted: τ / (γ · draft cost + verify cost), costs measured in steps of the target.",
    "Draft cost": "time to draft one token, in steps of the target.",
    "95 % interval": "where the number lies in 95 % of resamplings of the prompts, each with all its repeats.",
    "Setting": "greedy: the target takes its likeliest token. t0.8: it samples at temperature 0.8, and so does the "
    "drafter; with -greedy-drafts the drafter takes its likeliest token.",
    "Untrained": "the same drafter before training, measured in the same way.",
    "Replay": "acceptance worked out exactly from texts that the target wrote. The real decoder confirms it on some.",
}


def render_page(report: EvalReport, decision: GateDecision | None = None) -> str:
    """The whole HTML document."""
    title = f"{kind_name(report)} for {report.target.model_id}"
    return document(title, [f"<h1>{escape(title)}</h1>", *report_parts(report, decision), words_section()])


def words_section() -> str:
    """What the words of a page mean."""
    words = "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in _WORDS.items())
    return section("Words", f"<dl>{words}</dl>")


def kind_name(report: EvalReport) -> str:
    """What kind of drafter it is, in words."""
    return _KINDS.get(report.drafter_kind, report.drafter_kind)


def report_parts(report: EvalReport, decision: GateDecision | None = None) -> list[str]:
    """What the page says of one drafter, below its title: pieces of HTML."""
    return [
        f'<p class="soft">{escape(_facts(report))}</p>',
        _decision(decision),
        _objections(report.invalid_reasons),
        f'<p class="lead">{escape(" ".join(sentences(report)))}</p>',
        _tiles(report),
        figures(draw_pictures(report)),
        section("Acceptance by setting and draft length", _settings_table(report)),
        section("Acceptance by domain", _domain_table(report)),
        _context_section(report),
        section("Measured speed", _speed_tables(report)),
        costs_section(report.costs) if report.costs else "",
        heads_section(report.heads) if report.heads else "",
        section("Is it true? Replay and fidelity", _trust_tables(report)),
        f"<footer>{escape(_origin(report))}</footer>",
    ]


def _facts(report: EvalReport) -> str:
    return (
        f"{report.num_parameters / 1e6:,.1f} M parameters · step {report.checkpoint_step:,} · trained on "
        f"{report.num_training_rows:,} answers ({report.num_training_tokens:,} tokens) · evaluated in {report.dtype}"
    )


def _origin(report: EvalReport) -> str:
    return (
        f"Drafter {report.drafter_sha256[:16]} · target weights {report.target.weights_sha256[:16]} · tokenizer "
        f"{report.target.tokenizer_sha256[:16]} · evaluation prompts {report.eval_prompts_sha256[:16]} (SHA-256). All "
        "counts per prompt are in report.json."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _decision(decision: GateDecision | None) -> str:
    if decision is None:
        return ""
    version = decision.champion_version
    against = "no champion yet" if version is None else f"champion: version {version}"
    reasons = [f"{c.name}: {c.reason}" for c in decision.checks if not c.passed and c.on_failure == decision.verdict]
    rows = []
    for check in decision.checks:
        result = "ok" if check.passed else check.on_failure
        numbers = map(_number, (check.observed, check.threshold, check.champion))
        rows.append([check.name, result, *numbers, check.reason])
    head = ["check", "result", "observed", "required", "champion", "reason"]
    return (
        f'<div class="box {escape(decision.verdict)}"><strong>Gate: {escape(decision.verdict)}</strong> '
        f"({escape(against)}){bullets(reasons or [decision.reason])}"
        f"<details><summary>All {len(rows)} checks</summary>"
        f"{table('Checks of the gate', head, rows, text=(0, 1, 5))}</details></div>"
    )


def _objections(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    return f'<div class="box reject"><strong>This report may not be judged</strong>{bullets(reasons)}</div>'


def _tiles(report: EvalReport) -> str:
    primary, gain, best = report.primary, gain_over_untrained(report), best_speed(report)
    tiles = []
    if primary is not None:
        s, gamma = primary.summary, primary.num_speculative_tokens
        tiles = [
            (
                f"{s.mean_accepted_length:.2f}",
                f"τ, tokens per target step ({bounds(s.mean_accepted_length_interval)})",
            ),
            (f"{s.acceptance_rate:.1%}", f"of drafted tokens accepted ({primary.setting}, γ\u00a0=\u00a0{gamma})"),
        ]
    if gain is not None:
        spread = f" ({gain[1][0]:+.1%} to {gain[1][1]:+.1%})" if gain[1] else ""
        tiles.append((f"{gain[0]:+.1%}", f"τ against the untrained drafter{spread}"))
    if best is not None:
        words = f"times the speed of the target alone at {drafted(best)} ({bounds(best.speedup_interval)})"
        tiles.append((f"{best.speedup:.2f}", words))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>' for value, words in tiles
        )
        + "</div>"
    )


def _acceptance_cells(summary: AcceptanceSummary) -> list[str]:
    return [
        f"{summary.mean_accepted_length:.3f}",
        bounds(summary.mean_accepted_length_interval, 3),
        f"{summary.acceptance_rate:.1%}",
        str(summary.num_prompts),
    ]


def _settings_table(report: EvalReport) -> str:
    def row(name: str, r: AcceptanceResult) -> list[str]:
        sampling = [f"{r.temperature:g}", r.draft_sample_method]
        return [name, str(r.num_speculative_tokens), *_acceptance_cells(r.summary), *sampling]

    results = sorted(
        report.acceptance, key=lambda r: (r.setting != report.primary_setting, r.setting, r.num_speculative_tokens)
    )
    rows = [row(r.setting, r) for r in results] + [row("untrained", report.untrained)]
    head = ["setting", "γ", "τ", "95 % interval", "accepted", "prompts", "temperature", "drafts"]
    main = next((i for i, r in enumerate(results) if r == report.primary), -1)
    note = '<p class="soft">The highlighted row is the one that the gate judges.</p>' if main >= 0 else ""
    return table("Acceptance by setting", head, rows, text=(0, 7), main=main) + note


def _domain_table(report: EvalReport) -> str:
    primary = report.primary
    if primary is None:
        return "<p>Not measured at the primary setting.</p>"
    rows = []
    for name, summary in sorted(primary.domains.items(), key=lambda item: -item[1].mean_accepted_length):
        before = report.untrained.domains.get(name)
        base = before.mean_accepted_length if before else None
        gain = ["-", "-"] if base is None else [f"{base:.3f}", f"{summary.mean_accepted_length / base - 1:+.1%}"]
        rows.append([name, *_acceptance_cells(summary), *gain])
    total, base = primary.summary, report.untrained.summary.mean_accepted_length
    rows.append(
        ["all tokens", *_acceptance_cells(total), f"{base:.3f}", f"{total.mean_accepted_length / base - 1:+.1%}"]
    )
    domains = primary.domains.values()
    if domains:
        rate, length = fmean(s.acceptance_rate for s in domains), fmean(s.mean_accepted_length for s in domains)
        rows.append(["mean of domains", f"{length:.3f}", "-", f"{rate:.1%}", str(total.num_prompts), "-", "-"])
    note = (
        '<p class="soft">“All tokens” sums the counts, so long answers weigh more; the gate judges it. '
        "“Mean of domains” gives each domain the same weight.</p>"
    )
    head = ["domain", "τ", "95 % interval", "accepted", "prompts", "τ untrained", "gain"]
    return table("Acceptance by domain", head, rows, main=len(rows) - (2 if domains else 1)) + note


def _context_section(report: EvalReport) -> str:
    groups = by_context(report.primary.prompts) if report.primary else {}
    rows = [[name, *_acceptance_cells(summary)] for name, summary in groups.items()]
    head = ["tokens of the prompt", "τ", "95 % interval", "accepted", "prompts"]
    return section("Acceptance by context length", table("By context length", head, rows)) if rows else ""


def _speed_tables(report: EvalReport) -> str:
    best = best_speed(report)
    timed = [speed for speed in report.speeds if speed.points]
    tables = [
        (f"<h3>Batch size {speed.batch_size}</h3>" if len(timed) > 1 else "") + _speed_table(speed, best)
        for speed in timed
    ]
    return "".join(tables) or "<p>Not measured.</p>"


def _speed_table(speed: Speed, best: SpeedPoint | None) -> str:
    rows = [
        [
            drafted(p),
            f"{p.tokens_per_second:.1f}",
            f"{p.speedup:.3f}",
            bounds(p.speedup_interval, 3),
            f"{p.predicted_speedup:.3f}",
            f"{p.mean_accepted_length:.3f}",
        ]
        for p in speed.points
    ]
    rows.insert(0, ["target alone", f"{speed.target_tokens_per_second:.1f}", "1", "-", "-", "1"])
    head = ["drafted", "tokens per second", "speed", "95 % interval", "predicted speed", "τ in this run"]
    facts = (
        f"{speed.hardware} · {speed.device}, {speed.num_threads} threads, {speed.dtype} · batch size "
        f"{speed.batch_size} · {speed.num_prompts} prompts, {speed.repeats} repeats, interleaved with the "
        f"target alone · drafting one token costs {speed.draft_cost_ratio:.3f} of a target step"
    )
    main = 1 + speed.points.index(best) if best in speed.points else -1
    surprises = bullets(said) if (said := mispredicted(speed)) else ""
    rates = table(f"Measured speed, batch size {speed.batch_size}", head, rows, main=main)
    return f'{rates}{surprises}<p class="soft">{escape(facts)}.</p>'


def _differing(certification: Certification) -> str:
    """Of a greedy certification: a sampled one has no steps that must be equal."""
    count = len(certification.mismatched_prompts)
    return f" ({count} prompt{'s' * (count > 1)} differ{'s' * (count == 1)})" if count else ""


def _trust_tables(report: EvalReport) -> str:
    rows = [
        [
            c.setting,
            drafted(c),
            str(c.num_prompts),
            f"{c.replay_mean_accepted_length:.4f}",
            f"{c.decoder_mean_accepted_length:.4f}",
            bounds(c.replay_interval, 4),
            "confirmed" if c.passed else "not confirmed" + _differing(c),
        ]
        for c in report.certifications
    ]
    head = ["setting", "drafted", "prompts", "τ by replay", "τ by the decoder", "allowed", "result"]
    replay = (
        table("Replay against the real decoder", head, rows, text=(0, 6)) if rows else "<p>Replay was not checked.</p>"
    )
    fidelity = report.fidelity
    if fidelity is None:
        return replay + "<p>Fidelity was not tested.</p>"
    words = (
        f"Fidelity: {fidelity.num_identical} of {fidelity.num_prompts} greedy outputs ({fidelity.dtype}) are the same, "
        "token by token, with and without the drafter."
    )
    differing = [
        [d.prompt_id, str(d.position), f"{d.logit_gap:.4f}", "near-tie" if d.near_tie else "difference"]
        for d in fidelity.divergences
    ]
    head = ["prompt", "first differing token", "target's top-2 logit gap", "kind"]
    outputs = table("Outputs that differ", head, differing, text=(0, 3)) if differing else ""
    return f"{replay}<p>{escape(words)}</p>{outputs}"
