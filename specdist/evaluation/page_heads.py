"""Owns the part of a report's page that is about draft heads: how good each is, and which chain or tree to serve."""

from html import escape

from specdist.evaluation.page_parts import bounds, bullets, figure, section, table
from specdist.evaluation.pictures import draw_shapes
from specdist.schema_heads import HeadAccuracy, HeadsReport, ShapeSpeed

# Top-1 and top-5 of heads 0 to 4, in percent: Vicuna-7B in `assets/medusa_acc.csv` of FasterDecoding/Medusa
PUBLISHED = ((56.0, 78.0), (31.6, 56.3), (20.1, 41.7), (14.7, 34.0), (11.8, 30.0))
_PUBLISHED_NOTE = (
    "A head is right within k where the token that the target wrote is among its k best. Head 0 predicts the token "
    "after the target's own next one, head 1 the one after that, and so on, each at every place of the evaluation "
    "texts. For orientation: Medusa's authors published those of Vicuna-7B (FasterDecoding/Medusa, "
    "assets/medusa_acc.csv: five heads of one layer, one epoch of ShareGPT). They were taken on training batches of "
    "human and assistant turns alike, so the two are no contest."
)
_WORDS = (
    "In each step the target checks a block of drafted tokens in one pass. A chain holds one guess for each of the "
    "next tokens, and ends at the first wrong one. A tree holds several guesses for each, so that more often one is "
    "right, but the target has to check them all, which takes longer the more there are and the more texts it serves "
    "at once. What pays depends on how fast this hardware checks them, so that is measured."
)
_SHAPES_NOTE = (
    "τ of a tree is taken on other prompts than the tree was found on: each half of the prompts with the tree of the "
    "other half. Predicted speed: τ / (cost of verifying + cost of drafting), both in steps of one token of the target "
    "at the same batch size. The best of many predictions is a little optimistic; measured speed decides."
)


def heads_section(heads: HeadsReport) -> str:
    """The whole section, as HTML."""
    return section(
        "Draft heads: accuracy, chain and tree",
        f'<div class="box"><strong>What to serve</strong>{bullets(recommendations(heads))}</div>'
        f"<p>{escape(_WORDS)}</p>"
        f"{_accuracy_table(heads.accuracies)}{_note(_PUBLISHED_NOTE)}"
        f'<div class="pictures">{figure(draw_shapes(heads))}</div>'
        f"{_shapes_table(heads)}{_note(_SHAPES_NOTE)}"
        f"{_cost_table(heads)}{_note(_facts(heads))}",
    )


def _note(words: str) -> str:
    return f'<p class="soft">{escape(words)}</p>'


def _named(kind: str, num_nodes: int) -> str:
    return f"{kind} of {num_nodes} token{'s' if num_nodes > 1 else ''}"


def _because(heads: HeadsReport, speed: ShapeSpeed) -> str:
    tau = heads.shape(speed.kind, speed.num_nodes).mean_accepted_length
    return (
        f"it makes {tau:.2f} tokens per step, and a step takes {speed.verify_cost_ratio + speed.draft_cost_ratio:.2f} "
        f"times as long as one of the target alone ({speed.verify_cost_ratio:.2f} for checking, "
        f"{speed.draft_cost_ratio:.2f} for drafting)"
    )


def recommendations(heads: HeadsReport) -> list[str]:
    """What to serve at each batch size, and with an engine that knows chains only, in sentences."""
    said = []
    for best in heads.recommended:
        texts = "one text at a time" if best.batch_size == 1 else f"{best.batch_size} texts at once"
        name, times = _named(best.kind, best.num_nodes), f"{best.predicted_speedup:.2f} times as fast"
        if best.predicted_speedup > 1.0:
            said.append(
                f"Serving {texts}: the {name} is predicted to be {times} as the target alone, because "
                f"{_because(heads, best)}."
            )
        else:
            said.append(
                f"Serving {texts}: the target alone. The best of these, the {name}, is predicted to be {times} only: "
                f"{_because(heads, best)}."
            )
    smallest = min(speed.batch_size for speed in heads.speeds)
    chain = next(
        s for s in heads.speeds if (s.batch_size, s.kind, s.num_nodes) == (smallest, "chain", heads.chain_length)
    )
    said.append(
        f"With vLLM, which drafts chains only: num_speculative_tokens {heads.chain_length}, predicted "
        f"{chain.predicted_speedup:.2f} times as fast at batch size {smallest}."
    )
    return said


def _accuracy_table(accuracies: list[HeadAccuracy]) -> str:
    rows = []
    for one in accuracies:
        published = PUBLISHED[one.head] if one.head < len(PUBLISHED) else None
        shown = ["-", "-"] if published is None else [f"{value:.1f} %" for value in published]
        percent = [f"{100 * value:.1f} %" for value in one.accuracy]
        spread = f"{bounds([100 * bound for bound in one.intervals[0]], 1)}"
        rows.append([f"head {one.head}", percent[0], spread, *percent[1:], f"{one.num_tokens:,}", *shown])
    top = accuracies[0].top
    head = ["", f"top-{top[0]}", "95 % interval", *(f"top-{k}" for k in top[1:]), "places"]
    return table("Accuracy of the heads", [*head, "Vicuna-7B top-1", "Vicuna-7B top-5"], rows)


def _shapes_table(heads: HeadsReport) -> str:
    sizes = [cost.batch_size for cost in heads.verify_costs]
    predicted = {(s.kind, s.num_nodes, s.batch_size): s for s in heads.speeds}
    rows = []
    for shape in heads.shapes:
        speeds = [predicted[shape.kind, shape.num_nodes, size] for size in sizes]
        rows.append(
            [
                _named(shape.kind, shape.num_nodes),
                str(max(map(len, shape.paths))),
                f"{shape.mean_accepted_length:.3f}",
                bounds(shape.mean_accepted_length_interval, 3),
                f"{speeds[0].draft_cost_ratio:.3f}",
                *(f"{speed.predicted_speedup:.2f}" for speed in speeds),
            ]
        )
    names = [(shape.kind, shape.num_nodes) for shape in heads.shapes]
    best = heads.recommended[0]
    head = ["shape", "levels", "τ", "95 % interval", f"draft cost, batch {sizes[0]}"]
    head += [f"predicted speed, batch {size}" for size in sizes]
    return table("Chains and trees", head, rows, main=names.index((best.kind, best.num_nodes)))


def _cost_table(heads: HeadsReport) -> str:
    rows = [
        [str(cost.batch_size), f"{1e3 * cost.step_seconds:.1f}", *(f"{ratio:.2f}" for ratio in cost.ratios)]
        for cost in heads.verify_costs
    ]
    head = ["batch size", "step in ms", *(f"{n} token{'s' if n > 1 else ''}" for n in heads.verify_costs[0].num_tokens)]
    return table("Cost of verifying", head, rows)


def _facts(heads: HeadsReport) -> str:
    return (
        "Cost of one target pass over so many new tokens of each text, in steps of one token at that batch size, after "
        f"a short context: medians of passes in turn. {heads.hardware}, {heads.num_threads} threads, {heads.dtype}; τ "
        f"and accuracies of {heads.num_prompts} prompts."
    )
