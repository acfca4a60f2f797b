"""Owns the model card: README.md of what serves, in Hugging Face's format (YAML, then Markdown), from records alone.

Format: https://huggingface.co/docs/hub/model-cards. What the records do not hold is said to be unknown, not left out.
How each engine is told of the drafter is in card_serving.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from specdist.dataset.manifest import GIVEN_ENGINE
from specdist.drafter_config import HEAD_KINDS
from specdist.evaluation.card_serving import limits, measuring, serving
from specdist.evaluation.summary import drafted, gain_over_untrained, sentences
from specdist.export_record import ExportRecord
from specdist.schema import (
    AcceptanceResult,
    AcceptanceSummary,
    DatasetManifest,
    EvalReport,
    GateDecision,
    SamplingSpec,
    Speed,
    SpeedPoint,
)
from specdist.schema_heads import DraftShape

CARD_FILE = "README.md"
UNKNOWN = "unknown"  # a licence of Hugging Face's own list


def model_card(
    report: EvalReport,
    record: ExportRecord,
    decision: GateDecision | None,
    manifest: DatasetManifest | None,
    *,
    name: str,
    licence: str | None = None,
) -> str:
    """The card of the export `record` that `report` measured: what it is, the numbers, data, serving, limits.

    `decision`: the gate's verdict, None where it was not judged. `manifest`: the dataset it learned from, None where
    that is not known. `licence`: an identifier of Hugging Face's (https://huggingface.co/docs/hub/repositories-licenses).
    """
    header = yaml.safe_dump(_metadata(report, record, name, licence), sort_keys=False, allow_unicode=True, width=120)
    sections = [
        [f"# {name}", "", _introduction(report, record)],
        ["## Measured", "", *_measured(report), "", _verdict(decision)],
        ["## Learned from", "", *_data(report, manifest)],
        ["## Serve it", "", *serving(record)],
        ["## Known limits", "", *_items(limits(record))],
        ["## Load and measure it", "", *measuring(record)],
        ["## Licence", "", _licence(record, licence)],
    ]
    return f"---\n{header}---\n\n" + "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _metadata(report: EvalReport, record: ExportRecord, name: str, licence: str | None) -> dict[str, Any]:
    heads = record.drafter_kind in HEAD_KINDS
    values: dict[str, Any] = {"license": licence or UNKNOWN}
    if "/" in record.target.model_id:  # a Hugging Face id; of a directory only its name is known
        values["base_model"] = record.target.model_id
    values["library_name"] = "specdist" if heads else "transformers"
    values["pipeline_tag"] = "text-generation"
    values["tags"] = ["speculative-decoding", record.drafter_kind.replace("_", "-"), "specdist"]
    if report.primary is not None:
        values["model-index"] = [{"name": name, "results": [_results(report, record, report.primary)]}]
    return values


def _results(report: EvalReport, record: ExportRecord, primary: AcceptanceResult) -> dict[str, Any]:
    where = f"{primary.setting}, γ={primary.num_speculative_tokens}"
    metrics = [
        ("mean_accepted_length", f"τ, tokens per target step ({where})", primary.summary.mean_accepted_length),
        ("acceptance_rate", f"accepted drafted tokens ({where})", primary.summary.acceptance_rate),
    ]
    if served := _served_point(report, record):
        metrics.append(("speedup", f"measured speed, times the target alone ({drafted(served)})", served.speedup))
    return {
        "task": {"type": "text-generation", "name": "Speculative decoding"},
        "dataset": {
            "type": report.eval_prompts_sha256[:12],
            "name": f"{primary.summary.num_prompts} held-out prompts",
        },
        "metrics": [{"type": kind, "name": name, "value": round(value, 4)} for kind, name, value in metrics],
    }


def _served_point(report: EvalReport, record: ExportRecord) -> SpeedPoint | None:
    """The measured speed of the chain that engines are told to draft; None where that length was not timed."""
    gamma = record.speculative_config.get("num_speculative_tokens")
    chains = [point for point in (report.speed.points if report.speed else []) if point.num_tree_nodes is None]
    return next((point for point in chains if point.num_speculative_tokens == gamma), None)


def _introduction(report: EvalReport, record: ExportRecord) -> str:
    target, parameters = record.target, f"{record.num_parameters / 1e6:.1f} M parameters"
    if report.num_target_parameters:
        parameters += f", {record.num_parameters / report.num_target_parameters:.1%} of the target's"
    what = "Draft heads" if record.drafter_kind in HEAD_KINDS else "A draft model"
    output = (
        "The target verifies every guess, so its output stays its own."
        if record.lossless
        else "**Not lossless**: adapters come with it that change the target, and so its output."
    )
    return (
        f"{what} (`{record.drafter_kind}`, {parameters}) for speculative decoding with `{target.model_id}` and with no "
        f"other model: what it guesses are the next tokens of that target. {output} It is of no use alone.\n"
        "\n"
        f"The target's weights have the SHA-256 `{target.weights_sha256}`, its tokenizer "
        f"`{target.tokenizer_sha256[:16]}…`, its chat template `{target.chat_template_sha256[:16]}…`. This drafter is "
        f"`{record.drafter_sha256}`, exported from training step {record.checkpoint_step}."
    )


def _measured(report: EvalReport) -> list[str]:
    lines = [*_items(sentences(report)), "", *_table(_ACCEPTANCE_HEAD, _acceptance_rows(report))]
    if report.primary is not None and len(report.primary.domains) > 1:
        lines += ["", *_table(_DOMAIN_HEAD, _domain_rows(report.primary))]
    for speed in report.speeds:
        lines += ["", _timed(speed), "", *_table(_SPEED_HEAD, _speed_rows(speed))]
    return lines


_ACCEPTANCE_HEAD = ("decoding", "prompts", "τ (95 %)", "accepted", "accepted at position 1, 2, …")
_DOMAIN_HEAD = ("domain", "prompts", "τ (95 %)", "accepted")
_SPEED_HEAD = ("drafted", "tokens/s", "times the target alone (95 %)", "predicted")


def _acceptance_rows(report: EvalReport) -> Iterable[Sequence[str]]:
    """Every setting at the judged draft length, then what training started from and gained."""
    for result in report.acceptance:
        if result.num_speculative_tokens == report.num_speculative_tokens:
            yield _acceptance_row(f"{result.setting}, γ={result.num_speculative_tokens}", result)
    if tree := report.heads and report.heads.draft_tree:
        yield (f"greedy, its tree of {tree.num_nodes} nodes", "", _length(tree), "", "")
    yield _acceptance_row(f"untrained, {report.untrained.setting}", report.untrained)
    if (gain := gain_over_untrained(report)) is not None:
        bounds = "" if gain[1] is None else f" ({gain[1][0]:+.1%} to {gain[1][1]:+.1%})"
        yield ("gain of τ over untrained", "", f"{gain[0]:+.1%}{bounds}", "", "")


def _acceptance_row(name: str, result: AcceptanceResult) -> Sequence[str]:
    summary = result.summary
    positions = ", ".join(f"{value:.1%}" for value in summary.acceptance_at_position)
    return (name, str(summary.num_prompts), _length(result.summary), f"{summary.acceptance_rate:.1%}", positions)


def _domain_rows(primary: AcceptanceResult) -> Iterable[Sequence[str]]:
    for domain, summary in sorted(primary.domains.items()):
        yield (domain, str(summary.num_prompts), _length(summary), f"{summary.acceptance_rate:.1%}")


def _length(summary: AcceptanceSummary | DraftShape) -> str:
    low, high = summary.mean_accepted_length_interval
    return f"{summary.mean_accepted_length:.3f} ({low:.3f} to {high:.3f})"


def _timed(speed: Speed) -> str:
    return (
        f"Wall clock against the target alone ({speed.target_tokens_per_second:.1f} tokens/s): {speed.hardware}, "
        f"{speed.num_threads} threads on {speed.device}, {speed.dtype}, batch size {speed.batch_size}, "
        f"{speed.num_prompts} prompts, {speed.repeats} times each. Drafting a token costs "
        f"{speed.draft_cost_ratio:.3f} of a target step."
    )


def _speed_rows(speed: Speed) -> Iterable[Sequence[str]]:
    for point in speed.points:
        low, high = point.speedup_interval
        times = f"{point.speedup:.2f} ({low:.2f} to {high:.2f})"
        yield (drafted(point), f"{point.tokens_per_second:.1f}", times, f"{point.predicted_speedup:.2f}")


def _verdict(decision: GateDecision | None) -> str:
    if decision is None:
        return "**Verdict: not judged** by a gate."
    against = "as the first" if decision.champion_version is None else f"against version {decision.champion_version}"
    return f"**Verdict: {decision.verdict}**, judged {against}. {decision.reason}."


def _data(report: EvalReport, manifest: DatasetManifest | None) -> list[str]:
    if manifest is None:
        return [
            f"{report.num_training_rows} answers, {report.num_training_tokens} tokens. Where they came from is unknown."
        ]
    inputs, system = manifest.inputs, manifest.inputs.chat_format.system_prompt
    domains = ", ".join(f"{name} {count}" for name, count in sorted(manifest.domains.items()))
    return _items(
        [
            f"{manifest.num_rows} answers to {manifest.num_prompts} prompts, {manifest.num_supervised_tokens} tokens "
            f"to learn; {manifest.num_truncated} cut off by the length limit.",
            f"{_author(manifest)}.",
            f"System prompt: {system!r}." if system else "No system prompt but those of the conversations.",
            f"Answers by domain: {domains}.",
            f"SHA-256 of the prompts `{inputs.prompts_sha256}`, of the answers `{manifest.rows_sha256}`; of the "
            f"evaluation's prompts `{report.eval_prompts_sha256}`.",
            "Licences of the prompts: unknown to this card; the prompts' own manifest has them, where it names any.",
        ]
    )


def _author(manifest: DatasetManifest) -> str:
    inputs = manifest.inputs
    if inputs.engine == GIVEN_ENGINE:
        return f"**Not written by `{inputs.target.model_id}`**: the answers came with the prompts"
    samplings = dict.fromkeys(map(_sampling, inputs.samplings))
    engine = f"{', '.join(manifest.engines)} ({inputs.dtype})"
    return f"Written by `{inputs.target.model_id}` in {engine}: {'; '.join(samplings)}; seed {inputs.seed}"


def _sampling(sampling: SamplingSpec) -> str:
    if sampling.is_greedy:
        return f"greedy, up to {sampling.max_new_tokens} tokens"
    options = {"top-k": sampling.top_k or None, "top-p": sampling.top_p if sampling.top_p < 1 else None}
    options["min-p"] = sampling.min_p or None
    said = "".join(f", {name} {value:g}" for name, value in options.items() if value is not None)
    return f"temperature {sampling.temperature:g}{said}, up to {sampling.max_new_tokens} tokens"


def _licence(record: ExportRecord, licence: str | None) -> str:
    own = f"`{licence}`." if licence else "Unknown: whoever trained it named none (`license:` of the recipe)."
    return (
        f"{own} A draft cut from the target or trained on its answers may fall under the licence of "
        f"`{record.target.model_id}`, which this card does not know."
    )


def _items(lines: Iterable[str]) -> list[str]:
    return [f"* {line}" for line in lines]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
