"""Owns the part of a report's page that is about costs: of a verified block, a draft, the first token, and memory."""

from html import escape

from specdist.evaluation.page_parts import bullets, figure, section, table
from specdist.evaluation.pictures import draw_costs
from specdist.schema_costs import DraftCost, FirstToken, Memory, StepCosts


def costs_section(costs: StepCosts) -> str:
    """The whole section, as HTML."""
    return section(
        "What a step costs",
        f'<div class="pictures">{figure(draw_costs(costs))}</div>'
        f"{_verify_table(costs)}{bullets([*_draft_words(costs.draft), _first_token_words(costs.first_token)])}"
        f"{bullets(_memory_words(costs.memory))}"
        f'<p class="soft">{escape(_facts(costs))}</p>',
    )


def _verify_table(costs: StepCosts) -> str:
    rows = [
        [str(curve.batch_size), f"{1e3 * curve.step_seconds:.1f}", *(f"{ratio:.2f}" for ratio in curve.ratios)]
        for curve in costs.verify
    ]
    tokens = costs.verify[0].num_tokens
    head = ["batch size", "step in ms", *(f"{n} token{'s' if n > 1 else ''}" for n in tokens)]
    return table("Cost of verifying", head, rows)


def _draft_words(draft: list[DraftCost]) -> list[str]:
    chains = [
        f"{c.ratio:.2f} for {c.num_tokens} ({c.ratio / c.num_tokens:.2f} a token)" for c in draft if c.kind == "chain"
    ]
    trees = [f"{c.ratio:.2f} for a tree of {c.num_tokens} nodes" for c in draft if c.kind == "tree"]
    return [f"Drafting a block takes, in steps of the target: {', '.join(chains + trees)}."] if draft else []


def _first_token_words(first: FirstToken) -> str:
    return (
        f"The first token of a prompt of {first.prompt_tokens} tokens comes after {first.target_seconds:.3f} s without "
        f"and {first.drafting_seconds:.3f} s with the drafter. Drafting the first block then takes "
        f"{first.first_block_seconds:.3f} s, in which a draft model reads the prompt."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _memory_words(memory: Memory) -> list[str]:
    said = [
        f"Weights take {_megabytes(memory.target_weights)} for the target and {_megabytes(memory.drafter_weights)} "
        f"more for the drafter; the cache of 1,000 tokens of a text {_megabytes(1000 * memory.target_cache_per_token)} "
        f"and {_megabytes(1000 * memory.drafter_cache_per_token)} more."
    ]
    if memory.peak is not None and memory.drafting_peak is not None:
        said.append(
            f"At its peak the process held {_megabytes(memory.peak)} while it decoded without the drafter, and "
            f"{_megabytes(memory.drafting_peak)} with it (both loaded)."
        )
    return said


def _facts(costs: StepCosts) -> str:
    return (
        "Cost of one target pass over so many new tokens of each text, in steps of one token at that batch size, after "
        f"{costs.context_tokens} tokens: medians of passes in turn. {costs.hardware}, {costs.num_threads} threads, "
        f"{costs.dtype}. Drafting, first token and memory are at batch size 1."
    )
