"""Owns what is said about draft heads alone: accuracy of each head, chains and trees with τ, costs, and the fastest.

One pass of the heads over the evaluation texts gives the ranks that all of it is made of; a target is timed beside.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel

from specdist import metrics
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import EvalSet, HeadsScorer
from specdist.evaluation.speed import hardware_name
from specdist.evaluation.tree_search import RankedTexts, cross_fitted, halves, replay_tree
from specdist.evaluation.verify_cost import VERIFIED_TOKENS, measure_costs, verify_cost_ratio
from specdist.progress import track
from specdist.schema import PromptCounts
from specdist.schema_heads import TOP, DraftShape, HeadAccuracy, HeadsReport, ShapeSpeed, VerifyCost
from specdist.target import check_tree_decoding, new_cache
from specdist.tree import DraftTree

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 4)
TREE_SIZES = (1, 2, 4, 8, 16, 32, 64)
_DRAWS = 2_000


def rank_texts(scorer: HeadsScorer, eval_set: EvalSet) -> RankedTexts:
    """The ranks of all texts that can be drafted; the texts are shared out over the processes, each gets all ranks."""
    state = PartialState()
    drafted = [text for text in eval_set.texts if len(text.row.completion_ids) > 1]
    mine = range(state.process_index, len(drafted), state.num_processes)
    ranks = [(i, scorer.ranks(drafted[i])) for i in track(mine, len(mine), "ranks of the heads' tokens", logger)]
    everyones = dict(gather_object(ranks))
    return RankedTexts([text.row for text in drafted], [everyones[i] for i in range(len(drafted))])


def head_accuracies(texts: RankedTexts) -> list[HeadAccuracy]:
    """Top-k accuracy of each head over every block start s ≥ 1 whose token s + head lies in the text."""
    return [_head_accuracy(texts, head) for head in range(texts.num_heads)]


def _head_accuracy(texts: RankedTexts, head: int) -> HeadAccuracy:
    by_prompt: dict[str, torch.Tensor] = {}
    for row, ranks in zip(texts.rows, texts.ranks, strict=True):
        if (ends := len(ranks) - head) > 1:
            hits = (ranks[1:ends, head, None] < torch.tensor(TOP)).sum(dim=0)  # [len(TOP)]
            counts = torch.cat([hits, torch.tensor([ends - 1])])
            by_prompt[row.prompt_id] = by_prompt.get(row.prompt_id, 0) + counts
    if not by_prompt:
        return HeadAccuracy(head, 0, list(TOP), [0.0] * len(TOP), [[0.0, 1.0]] * len(TOP))
    rows = torch.stack([by_prompt[prompt_id] for prompt_id in sorted(by_prompt)])
    *right, total = rows.sum(dim=0).tolist()
    shares = metrics.bootstrap_shares(rows.tolist(), draws=_DRAWS)  # [draws, len(TOP)]
    intervals = [metrics.interval(column) for column in shares.T]
    return HeadAccuracy(head, total, list(TOP), [hits / total for hits in right], intervals)


def _shape(kind: str, tree: DraftTree, counts: Sequence[PromptCounts], replayed: Sequence[PromptCounts]) -> DraftShape:
    return DraftShape(
        kind=kind,
        paths=[list(path) for path in tree.paths],
        mean_accepted_length=metrics.pooled_length(counts),
        mean_accepted_length_interval=metrics.interval(metrics.bootstrap_lengths(counts, draws=_DRAWS)),
        replayed_mean_accepted_length=metrics.pooled_length(replayed),
    )


def draft_shapes(texts: RankedTexts, tree_sizes: Sequence[int]) -> list[DraftShape]:
    """Chains of 1 to H tokens, then the best trees of at most each of `tree_sizes` nodes. τ of trees is cross-fitted.

    Raises ConfigError on fewer than two prompts.
    """
    chains = [DraftTree.chain(length) for length in range(1, texts.num_heads + 1)]
    counted = [(chain, replay_tree(texts, chain)) for chain in chains]
    return [
        *(_shape("chain", chain, counts, counts) for chain, counts in counted),
        *(_shape("tree", f.tree, f.counts, replay_tree(texts, f.tree)) for f in cross_fitted(texts, tree_sizes)),
    ]


def _tree(shape: DraftShape) -> DraftTree:
    return DraftTree(tuple(tuple(path) for path in shape.paths))


def predict_speeds(
    shapes: Sequence[DraftShape], cost: VerifyCost, draft_cost_ratios: Mapping[DraftTree, float]
) -> list[ShapeSpeed]:
    """Predicted speed-up of each shape at the batch size of `cost`: τ / (cost of its nodes and one more + of drafting).

    In a batch every text is taken to draft the same shape, and all steps to be full.
    """
    speeds = []
    for shape in shapes:
        verify, draft = verify_cost_ratio(cost, shape.num_nodes + 1), draft_cost_ratios[_tree(shape)]
        speedup = shape.mean_accepted_length / (verify + draft)
        speeds.append(ShapeSpeed(cost.batch_size, shape.kind, shape.num_nodes, verify, draft, speedup))
    return speeds


def fastest(speeds: Sequence[ShapeSpeed]) -> ShapeSpeed:
    """The highest predicted speed-up; of equal ones the first, so a chain before a tree.

    The prediction of the best of many is a little optimistic, as any choice by a measured number is.
    """
    return max(speeds, key=lambda speed: speed.predicted_speedup)


def _measured_speeds(
    scorer: HeadsScorer,
    model: PreTrainedModel,
    texts: RankedTexts,
    shapes: Sequence[DraftShape],
    batch_sizes: Sequence[int],
) -> tuple[list[VerifyCost], list[ShapeSpeed]]:
    token_ids = [token for row in texts.rows for token in row.prompt_ids + row.completion_ids]
    longest = max(shape.num_nodes for shape in shapes) + 1
    num_tokens = [*(n for n in VERIFIED_TOKENS if n < longest), longest]
    trees = list(dict.fromkeys(map(_tree, shapes)))  # a chain that is a tree as well is timed once
    costs, speeds = [], []
    for batch_size in batch_sizes:
        logger.info("timing target passes and drafting at batch size %d", batch_size)
        cost, ratios = measure_costs(
            model, scorer.heads, trees, token_ids, batch_size=batch_size, num_tokens=num_tokens
        )
        costs.append(cost)
        speeds += predict_speeds(shapes, cost, ratios)
    return costs, speeds


def _verifies_trees(model: PreTrainedModel) -> bool:
    try:
        check_tree_decoding(model, new_cache(model))
    except ConfigError as error:
        logger.warning("chains alone are measured: %s", error)
        return False
    return True


def _report(
    scorer: HeadsScorer,
    texts: RankedTexts,
    model: PreTrainedModel,
    batch_sizes: Sequence[int],
    tree_sizes: Sequence[int],
) -> HeadsReport:
    shapes = draft_shapes(texts, tree_sizes if _verifies_trees(model) else ())
    costs, speeds = _measured_speeds(scorer, model, texts, shapes, batch_sizes)
    at_size = [[speed for speed in speeds if speed.batch_size == size] for size in batch_sizes]
    return HeadsReport(
        hardware=hardware_name(model.device),
        num_threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        num_prompts=len(texts.prompt_ids),
        accuracies=head_accuracies(texts),
        shapes=shapes,
        verify_costs=costs,
        speeds=speeds,
        recommended=[fastest(of_size) for of_size in at_size],
        chain_length=fastest([speed for speed in at_size[0] if speed.kind == "chain"]).num_nodes,
    )


def heads_report(
    scorer: HeadsScorer,
    eval_set: EvalSet,
    model: PreTrainedModel,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    tree_sizes: Sequence[int] = TREE_SIZES,
) -> HeadsReport:
    """Everything on the heads of `scorer` from the greedy `eval_set` with stored states, timed beside `model`.

    All processes call it and get the same; they share the pass of the heads, the main one does and times the rest.
    Raises ConfigError on a sampled `eval_set`, on fewer than two prompts, and on batch or tree sizes below 1.
    """
    if not eval_set.sampling.is_greedy:
        raise ConfigError(f"temperature {eval_set.sampling.temperature}: expected greedy texts, a tree is not sampled")
    for name, sizes in (("batch_sizes", batch_sizes), ("tree_sizes", tree_sizes)):
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"{name} {list(sizes)}: expected one or more numbers of at least 1")
    texts = rank_texts(scorer, eval_set)
    halves(texts.prompt_ids)  # too few are refused by all processes, before the others wait for the main one
    is_main = PartialState().is_main_process
    shared = [_report(scorer, texts, model, sorted(set(batch_sizes)), tree_sizes) if is_main else None]
    broadcast_object_list(shared)
    if (report := shared[0]) is None:
        raise RuntimeError("the main process sent no report of the heads")
    return report
