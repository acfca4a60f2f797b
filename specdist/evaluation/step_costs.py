"""Owns measuring what decoding costs on this hardware, and the speed-up that follows from these costs and τ.

Costs of target passes and of drafting are medians of steps taken in turn (verify_cost.py).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdist import metrics
from specdist.decoding.loop import DecodeResult, decode
from specdist.drafters.base import DecodeContext, Drafter
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.evaluation.speed import hardware_name, reachable_lengths
from specdist.evaluation.verify_cost import (
    CONTEXT_TOKENS,
    CachedContext,
    interleaved,
    measure_verify_cost,
    passages,
    verify_cost_ratio,
)
from specdist.schema import DistillRow, SamplingSpec, Speed, SpeedPoint
from specdist.schema_costs import DraftCost, FirstToken, Memory, StepCosts
from specdist.schema_heads import VerifyCost

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4)
_ROUNDS, _SECONDS = 20, 8.0  # of one curve
_FIRST_TOKEN_REPEATS = 5
_STATUS, _REFERENCED = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure_step_costs(
    model: PreTrainedModel,
    drafter: Drafter,
    rows: Sequence[DistillRow],
    *,
    lengths: Sequence[int],
    trees: Sequence[Drafter] = (),
    batch_sizes: Sequence[int] = BATCH_SIZES,
    verify: Sequence[VerifyCost] = (),
) -> StepCosts:
    """Costs of target passes, of drafting chains of `lengths` and each drafter's tree, of the first token; memory.

    Texts are cut from `rows`. `verify`: curves of this target that were measured before, which are then taken.
    """
    token_ids = [token for row in rows for token in row.prompt_ids + row.completion_ids]
    for batch_size in batch_sizes if not verify else ():
        logger.info("timing target passes at batch size %d", batch_size)
        cost = measure_verify_cost(model, token_ids, batch_size=batch_size, rounds=_ROUNDS, limit=_SECONDS)
        verify = [*verify, cost]
    prompt = sorted((row.prompt_ids for row in rows), key=len)[len(rows) // 2]
    return StepCosts(
        hardware=hardware_name(model.device),
        num_threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        context_tokens=CONTEXT_TOKENS,
        verify=list(verify),
        draft=_draft_costs(model, drafter, token_ids, lengths, trees),
        first_token=_first_token(model, drafter, prompt),
        memory=_memory(model, drafter, prompt),
    )


def _draft_costs(
    model: PreTrainedModel,
    drafter: Drafter,
    token_ids: Sequence[int],
    lengths: Sequence[int],
    trees: Sequence[Drafter],
) -> list[DraftCost]:
    """Drafting of each block beside a step of the target."""
    context = CachedContext(model, passages(token_ids, 1, 1))
    state = DecodeContext(context.context[0].tolist(), None, torch.Generator())
    works: list[tuple[Drafter | None, int]] = [(None, 1)]
    works += [(drafter, n) for n in reachable_lengths(drafter, lengths)]
    works += [(tree, tree.tree.depth) for tree in trees if tree.tree]

    def run(number: int) -> None:
        own, length = works[number]
        if own is None:
            context.verify(length)
        else:
            own.commit(CONTEXT_TOKENS, context.hidden[0])  # takes the last draft back out of the cache
            own.propose(state, length).token_ids.tolist()

    for each in {id(own): own for own, _ in works if own is not None}.values():
        each.reset()
    seconds = interleaved(run, range(len(works)), rounds=_ROUNDS, limit=_SECONDS)
    costs = []
    for number, (own, length) in enumerate(works):
        if own is not None:
            kind, size = ("tree", own.tree.num_nodes) if own.tree else ("chain", length)
            costs.append(DraftCost(kind, size, seconds[number] / seconds[0]))
    return costs


def _two_tokens(model: PreTrainedModel, prompt_ids: list[int], drafter: Drafter | None) -> DecodeResult:
    return decode(model, prompt_ids, SamplingSpec(max_new_tokens=2), [], drafter=drafter, num_speculative_tokens=1)


def _first_token(model: PreTrainedModel, drafter: Drafter, prompt_ids: list[int]) -> FirstToken:
    pairs = [
        (_two_tokens(model, prompt_ids, None), _two_tokens(model, prompt_ids, drafter))
        for _ in range(_FIRST_TOKEN_REPEATS)
    ]
    return FirstToken(
        prompt_tokens=len(prompt_ids),
        target_seconds=median(alone.prefill_seconds for alone, _ in pairs),
        drafting_seconds=median(ours.prefill_seconds for _, ours in pairs),
        first_block_seconds=median(ours.draft_seconds for _, ours in pairs),
    )


def _weights(module: nn.Module | None, counted: set[int]) -> int:
    """Bytes of parameters that are not in `counted` yet, by their storage; they are added to it."""
    size = 0
    for parameter in module.parameters() if module is not None else ():
        if parameter.data_ptr() not in counted:
            counted.add(parameter.data_ptr())
            size += parameter.nbytes
    return size


def _cache_per_token(cache: Any) -> int:
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
    return sum(states.nbytes for states in tensors) // max(1, cache.get_seq_length())


def _memory(model: PreTrainedModel, drafter: Drafter, prompt_ids: list[int]) -> Memory:
    counted: set[int] = set()
    target_weights = _weights(model, counted)
    module: nn.Module | None = drafter.model if isinstance(drafter, DraftModelDrafter) else None
    if isinstance(drafter, HeadsDrafter):
        module = drafter.heads.heads
    peaks = [_peak(model.device, partial(_two_tokens, model, prompt_ids, own)) for own in (None, drafter)]
    context = CachedContext(model, torch.tensor([(prompt_ids * CONTEXT_TOKENS)[: CONTEXT_TOKENS + 1]]))
    return Memory(
        target_weights=target_weights,
        drafter_weights=_weights(module, counted),
        target_cache_per_token=_cache_per_token(context.cache),
        drafter_cache_per_token=_cache_per_token(drafter.cache) if isinstance(drafter, DraftModelDrafter) else 0,
        peak=peaks[0],
        drafting_peak=peaks[1],
    )


def _peak(device: torch.device, call: Callable[[], Any]) -> int | None:
    """Bytes at the peak of `call`: of tensors on CUDA, else resident ones on Linux; None elsewhere."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device)
    try:
        _REFERENCED.write_text("5")  # the peak is now the present size
    except OSError:
        return None
    call()
    lines = _STATUS.read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def predict_speed(speed: Speed, costs: StepCosts) -> Speed:
    """`speed` with each point's prediction from its τ and the measured costs of its block, at batch size 1.

    A point whose block was not measured, or of another batch size, keeps its own prediction, which is from the parts of
    the timed run.
    """
    if speed.batch_size != 1:
        return speed
    return replace(speed, points=[_predicted(point, costs) for point in speed.points])


def _predicted(point: SpeedPoint, costs: StepCosts) -> SpeedPoint:
    nodes = point.num_tree_nodes or point.num_speculative_tokens
    draft = costs.draft_ratio("tree" if point.num_tree_nodes else "chain", nodes)
    curve = next((cost for cost in costs.verify if cost.batch_size == 1), None)
    if draft is None or curve is None or nodes + 1 > curve.num_tokens[-1]:
        return point
    verify = verify_cost_ratio(curve, nodes + 1)
    return replace(point, predicted_speedup=metrics.predicted_speedup(point.mean_accepted_length, 1, draft, verify))
