"""Owns the HTML of a report: one file that needs nothing else, for wide and narrow screens, light and dark."""

from collections.abc import Sequence
from html import escape
from statistics import fmean

from specdist.evaluation.page_heads import heads_section
from specdist.evaluation.page_parts import bounds, bullets, figure, section, table
from specdist.evaluation.pictures import draw_pictures
from specdist.evaluation.summary import best_speed, drafted, gain_over_untrained, sentences
from specdist.schema import AcceptanceResult, AcceptanceSummary, EvalReport, GateDecision

_KINDS = {"draft_model": "Draft model", "medusa": "Medusa heads", "hydra": "Hydra heads"}

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #57606a; --line: #d8dee4;
  --card: #f6f8fa; --link: #0060a0; --promote: #1a7f37; --hold: #8a5a00; --reject: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --text: #e4e7eb; --soft: #9aa4af; --line: #333a42; --card: #1c2127; --link: #6cb6ff;
    --promote: #57c26e; --hold: #e0ad45; --reject: #ff8276; }
  figure img { filter: invert(0.9) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 1rem; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
p.lead { max-width: none; font-size: 1.05rem; }
ul { margin: .4rem 0; padding-left: 1.3rem; }
.soft, footer { color: var(--soft); font-size: .9rem; }
.box { border: 1px solid var(--line); border-left: .35rem solid var(--soft); border-radius: .4rem;
  background: var(--card); padding: .75rem 1rem; margin: 1.1rem 0; }
.box strong { letter-spacing: .02em; }
.promote { border-left-color: var(--promote); } .promote > strong { color: var(--promote); }
.hold { border-left-color: var(--hold); } .hold > strong { color: var(--hold); }
.reject { border-left-color: var(--reject); } .reject > strong { color: var(--reject); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .85rem; color: var(--soft); }
.pictures { columns: 2; column-gap: 1rem; }
figure { margin: 0 0 1rem; padding: .6rem; border: 1px solid var(--line); border-radius: .4rem; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th.t, td.t { text-align: left; } td.w { white-space: normal; min-width: 16rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--back); }
.box th:first-child, .box td:first-child { background: var(--card); }
tr.main td, tr.main td:first-child { font-weight: 650; background: var(--card); }
dt { font-weight: 650; margin-top: .6rem; } dd { margin: 0 0 0 1rem; max-width: 46rem; }
summary { cursor: pointer; color: var(--link); margin-top: .4rem; }
footer { margin-top: 2.5rem; overflow-wrap: anywhere; }
@media (max-width: 52rem) { .pictures { columns: 1; } main { padding: 1rem .9rem 2rem; }
  h1 { font-size: 1.4rem; } th, td { padding: .35rem .5rem; } }
@media print { .pictures { columns: 2; } .scroll { overflow: visible; } }
"""

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
    "95 % interval": "where the number lies in 95 % of resamplings of the prompts (speed: of the repeats).",
    "Setting": "greedy: the target takes its likeliest token. t0.8: it samples at temperature 0.8, and so does the "
    "drafter; with -greedy-drafts the drafter takes its likeliest token.",
    "Untrained": "the same drafter before training, measured in the same way.",
    "Replay": "acceptance worked out exactly from texts that the target wrote. The real decoder confirms it on some.",
}


def render_page(report: EvalReport, decision: GateDecision | None = None) -> str:
    """The whole HTML document."""
    title = f"{_KINDS.get(report.drafter_kind, report.drafter_kind)} for {report.target.model_id}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_facts(report))}</p>',
        _decision(decision),
        _objections(report.invalid_reasons),
        f'<p class="lead">{escape(" ".join(sentences(report)))}</p>',
        _tiles(report),
        f'<div class="pictures">{"".join(figure(picture) for picture in draw_pictures(report))}</div>',
        section("Acceptance by setting and draft length", _settings_table(report)),
        section("Acceptance by domain", _domain_table(report)),
        section("Measured speed", _speed_table(report)),
        heads_section(report.heads) if report.heads else "",
        section("Is it true? Replay and fidelity", _trust_tables(report)),
        section("Words", "<dl>" + "".join(f"<dt>{w}</dt><dd>{escape(t)}</dd>" for w, t in _WORDS.items()) + "</dl>"),
        f"<footer>{escape(_origin(report))}</footer>",
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the browser may fetch nothing
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


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


def _speed_table(report: EvalReport) -> str:
    speed = report.speed
    if speed is None or not speed.points:
        return "<p>Not measured.</p>"
    best = best_speed(report)
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
    main = 1 + speed.points.index(best) if best else -1
    return table("Measured speed", head, rows, main=main) + f'<p class="soft">{escape(facts)}.</p>'


def _trust_tables(report: EvalReport) -> str:
    rows = [
        [
            c.setting,
            drafted(c),
            str(c.num_prompts),
            f"{c.replay_mean_accepted_length:.4f}",
            f"{c.decoder_mean_accepted_length:.4f}",
            bounds(c.replay_interval, 4),
            "confirmed" if c.passed else f"not confirmed ({len(c.mismatched_prompts)} prompts differ)",
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
