"""Owns what makes an evaluation report's numbers believable: finite, complete, and ratios that agree with the counts.

Pure functions that name each fault in words. A number that was edited by hand, lost or turned into infinity is found
here, before anything compares it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from specdist.metrics import perplexity_ratio
from specdist.schema import AcceptanceResult, AcceptanceSummary, EvalReport, PromptCounts
from specdist.schema_heads import HeadsReport
from specdist.schema_quality import TargetQuality


def non_finite_numbers(report: EvalReport) -> list[str]:
    """Paths, such as `speed.points[0].speedup`, of the numbers that are NaN or infinite.

    Raises ArtifactError where a value is of a wrong type.
    """
    plain = report.to_json()
    EvalReport.from_json(plain, "evaluation report")
    return [path for path, value in _leaves(plain, "") if isinstance(value, float) and not math.isfinite(value)]


def count_faults(report: EvalReport) -> list[str]:
    """Impossible counts, summaries that differ from the counts, and measurements that are missing, in words."""
    faults: list[str] = []
    for result in [*report.acceptance, report.untrained]:
        owner = "untrained" if result is report.untrained else result.setting
        faults += (f"{owner} γ={result.num_speculative_tokens}: {fault}" for fault in _result_faults(result))
    faults += _missing_measurements(report)
    faults += _heads_faults(report.heads) if report.heads else []
    faults += _quality_faults(report.quality) if report.quality else []
    return faults


def measured_at(result: AcceptanceResult) -> tuple[str, float, str, int]:
    """How the drafter was run: setting, temperature, draft sample method, draft length."""
    return (result.setting, result.temperature, result.draft_sample_method, result.num_speculative_tokens)


def comparison_fault(report: EvalReport, other: EvalReport) -> str:
    """Why `other` cannot be compared with `report` at the primary setting of this one, as words that follow its name.

    Empty where it can. That both have one target is for the caller to ask.
    """
    if (primary := report.primary) is None:
        return "has nothing to be compared with: no acceptance at the primary setting"
    theirs = other.result(primary.setting, primary.num_speculative_tokens)
    if theirs is None:
        return f"was not measured at {primary.setting} γ={primary.num_speculative_tokens}"
    if report.eval_prompts_sha256 != other.eval_prompts_sha256:
        return _other_prompts(primary, theirs)
    return pairing_fault(primary, theirs)


def pairing_fault(ours: AcceptanceResult, theirs: AcceptanceResult) -> str:
    """Why two acceptances cannot be paired prompt by prompt, as words that follow the second's name; empty if not."""
    if measured_at(ours) != measured_at(theirs):
        return f"was measured at {measured_at(theirs)}, not at {measured_at(ours)}"
    if prompts_by_id(ours).keys() != prompts_by_id(theirs).keys():
        return _other_prompts(ours, theirs)
    if texts_recorded(ours, theirs) and ours.texts_sha256 != theirs.texts_sha256:
        return (
            "was measured on other answers to the same prompts: their length limit, sampling, system prompt, template "
            "arguments, tools, context or dtype differ"
        )
    return ""


def texts_recorded(*results: AcceptanceResult) -> bool:
    """Whether all say how the texts were written that they were measured on. Reports of before do not."""
    return all(result.texts_sha256 is not None for result in results)


def _other_prompts(ours: AcceptanceResult, theirs: AcceptanceResult) -> str:
    ids = prompts_by_id(ours).keys(), prompts_by_id(theirs).keys()
    shared = len(ids[0] & ids[1])
    return f"was measured on other prompts: {len(ids[0])} and {len(ids[1])}, of which {shared} have the same id"


def prompts_by_id(result: AcceptanceResult) -> dict[str, PromptCounts]:
    """The counts of each prompt, sorted by id: two results of the same prompts come in the same order."""
    return {p.prompt_id: p for p in sorted(result.prompts, key=lambda p: p.prompt_id)}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def _missing_measurements(report: EvalReport) -> Iterator[str]:
    primary, wanted = report.primary, f"{report.primary_setting} γ={report.num_speculative_tokens}"
    if primary is None:
        yield f"no acceptance at the primary setting {wanted}; evaluate there"
    elif fault := pairing_fault(primary, report.untrained):
        yield f"the untrained drafter {fault}; evaluate again in another --output_dir"


def _heads_faults(heads: HeadsReport) -> Iterator[str]:
    lengths = {(shape.kind, shape.num_nodes): shape.mean_accepted_length for shape in heads.shapes}
    for shape in heads.shapes:
        if not 1.0 <= shape.mean_accepted_length <= 1.0 + max(map(len, shape.paths), default=0):
            yield f"heads: τ {shape.mean_accepted_length} of the {shape.kind} of {shape.num_nodes}, beyond its levels"
    for speed in [*heads.speeds, *heads.recommended]:
        name = f"{speed.kind} of {speed.num_nodes} at batch size {speed.batch_size}"
        length, cost = lengths.get((speed.kind, speed.num_nodes)), speed.verify_cost_ratio + speed.draft_cost_ratio
        if length is None or not math.isclose(speed.predicted_speedup * cost, length, rel_tol=1e-6):
            yield f"heads: the predicted speed of the {name} differs from its τ and costs"
    if ("chain", heads.chain_length) not in lengths:
        yield f"heads: chain_length {heads.chain_length}, but no such chain was measured"


def _quality_faults(quality: TargetQuality) -> Iterator[str]:
    answers = quality.answers
    if not answers or min(a.num_tokens for a in answers) < 1:
        yield "quality: no answers, or one of no tokens"
    elif len({a.prompt_id for a in answers}) != len(answers):
        yield "quality: a prompt is counted twice"
    elif not math.isclose(perplexity_ratio(answers), quality.perplexity_ratio, rel_tol=1e-6):
        yield "quality: the perplexity ratio differs from the answers' likelihoods"
    if not 0 <= quality.num_identical <= quality.num_greedy:
        yield f"quality: {quality.num_identical} of {quality.num_greedy} greedy answers are the same"


def _result_faults(result: AcceptanceResult) -> Iterator[str]:
    if not result.prompts:
        yield "no prompts"
        return
    yield from (f"prompt {p.prompt_id} {fault}" for p in result.prompts if (fault := _prompt_fault(p, result)))
    if len({p.prompt_id for p in result.prompts}) != len(result.prompts):
        yield "a prompt is counted twice"
    groups: dict[str, list[PromptCounts]] = {}
    for p in result.prompts:
        groups.setdefault(p.domain, []).append(p)
    if groups.keys() != result.domains.keys():
        yield f"summaries of the domains {sorted(result.domains)}, but prompts of {sorted(groups)}"
    elif wrong := [name for name, prompts in groups.items() if not _agrees(result.domains[name], prompts)]:
        yield f"the summary of domain {wrong[0]!r} differs from its counts"
    if not _agrees(result.summary, result.prompts):
        yield "the summary differs from the counts"


def _prompt_fault(p: PromptCounts, result: AcceptanceResult) -> str | None:
    gamma, chain = result.num_speculative_tokens, [p.num_drafts, *p.accepted_at_position]
    slack = 1e-5 * (1.0 + abs(p.num_drafts))  # replay's expectations are sums of floats
    if len(p.accepted_at_position) != gamma:
        return f"has {len(p.accepted_at_position)} positions, expected {gamma}"
    if min(chain) < 0 or any(later > earlier + slack for earlier, later in pairwise(chain)):
        return "has counts that are negative or grow with the position"
    if not p.num_accepted_tokens - slack <= p.num_draft_tokens <= gamma * p.num_drafts + slack:
        return f"accepts {p.num_accepted_tokens} of {p.num_draft_tokens} tokens in {p.num_drafts} steps of {gamma}"
    return None


def _agrees(summary: AcceptanceSummary, prompts: Sequence[PromptCounts]) -> bool:
    drafts = sum(p.num_drafts for p in prompts)
    drafted = sum(p.num_draft_tokens for p in prompts)
    accepted = sum(p.num_accepted_tokens for p in prompts)
    if not 0 < drafts < math.inf:
        return False
    at_position = [sum(values) / drafts for values in zip(*(p.accepted_at_position for p in prompts), strict=False)]
    pairs = [
        (summary.num_prompts, len(prompts)),
        (summary.num_drafts, drafts),
        (summary.num_draft_tokens, drafted),
        (summary.num_accepted_tokens, accepted),
        (summary.acceptance_rate, accepted / drafted if drafted else 0.0),
        (summary.mean_accepted_length, 1.0 + accepted / drafts),
        (len(summary.mean_accepted_length_interval), 2),
        (len(summary.acceptance_at_position), len(at_position)),
        *zip(summary.acceptance_at_position, at_position, strict=False),
    ]
    return all(math.isclose(seen, expected, rel_tol=1e-6, abs_tol=1e-6) for seen, expected in pairs)
