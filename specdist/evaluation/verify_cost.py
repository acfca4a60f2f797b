"""Owns measuring what a decoding step costs: the target's pass over n new tokens, and drafting, timed in turn.

Costs come from shapes, dtype and hardware, not from what weights or texts say. Shapes: B texts of a batch, D hidden
size, N tokens to feed.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.drafters.heads import HeadsOnTarget
from specdist.schema_heads import VerifyCost
from specdist.target import cache_argument, chain_inputs, new_cache
from specdist.tree import DraftTree, candidates

CONTEXT_TOKENS = 64
VERIFIED_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65)  # trees of 1, 2, 4, … 64 nodes and the newest token
_ROUNDS, _MIN_ROUNDS, _SECONDS = 40, 5, 30.0
_NOISE = 0.8  # of a step: kernels of some sizes are a little faster than those of smaller ones, not by more

logger = logging.getLogger(__name__)

Key = TypeVar("Key")


def interleaved(
    run: Callable[[Key], None], keys: Sequence[Key], *, rounds: int = _ROUNDS, limit: float = _SECONDS
) -> dict[Key, float]:
    """Median seconds of `run` at each key, all in turn, so that a busy moment hits all alike; the first is warm-up.

    At most `rounds`; after `limit` seconds no other begins, but 5 are always made.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    clock = time.perf_counter
    end = clock() + limit
    for done in range(rounds + 1):
        if done > _MIN_ROUNDS and clock() > end:
            break
        for key in keys:
            began = clock()
            run(key)
            if done:
                seconds[key].append(clock() - began)
    return {key: median(values) for key, values in seconds.items()}


def passages(token_ids: Sequence[int], batch_size: int, num_tokens: int) -> Tensor:
    """Rows of a context and so many tokens after it, cut from `token_ids`, which is repeated as needed: [B, ...]."""
    needed = batch_size * (CONTEXT_TOKENS + num_tokens)
    repeated = torch.tensor(token_ids).repeat(needed // len(token_ids) + 1)
    return repeated[:needed].view(batch_size, -1)


class CachedContext:
    """Texts whose first CONTEXT_TOKENS tokens are in the target's cache; their other tokens are fed again and again.

    `token_ids` [B, CONTEXT_TOKENS + N]; `hidden` [B, D] is the state that produces the first of the others.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, token_ids: Tensor) -> None:
        self.model, self.cache = model, new_cache(model)
        self.context, self.following = token_ids.to(model.device).tensor_split([CONTEXT_TOKENS], dim=1)
        self.hidden: Tensor = self._feed(self.context, 1).hidden_states[-1][:, -1]

    def _feed(self, token_ids: Tensor, logits_to_keep: int) -> Any:
        inputs = chain_inputs(self.model, self.cache, token_ids.shape[1])
        cache = {cache_argument(self.model): self.cache, "use_cache": True}
        return self.model(
            input_ids=token_ids, **inputs, **cache, output_hidden_states=True, logits_to_keep=logits_to_keep
        )

    @torch.inference_mode()
    def verify(self, num_tokens: int) -> None:
        """One pass over so many tokens after the context, to the target's own tokens; the cache is then as before."""
        self._feed(self.following[:, :num_tokens], 0).logits.argmax(dim=-1).tolist()  # waits for the device
        self.cache.crop(-num_tokens)


def _levels(tree: DraftTree, each_parent: bool) -> list[tuple[int, int]]:
    """Of each level of a tree: how often its head is asked for one text, and for how many candidates."""
    levels = []
    for depth in range(1, tree.depth + 1):
        nodes = [path for path in tree.paths if len(path) == depth]
        asked = len({path[:-1] for path in nodes}) if each_parent else 1
        levels.append((asked, max(path[-1] for path in nodes) + 1))
    return levels


@torch.inference_mode()
def draft(heads: HeadsOnTarget, tree: DraftTree, hidden: Tensor, newest: Tensor) -> None:
    """The work of drafting `tree` from states [B, D] after tokens [B, 1]: heads are asked as HeadsDrafter asks them.

    Medusa's heads are asked all at once, Hydra's once for each parent. Which tokens come of it is not looked at.
    """
    best = newest
    ahead = None if heads.sees_draft else heads.logits_ahead(hidden, tree.depth)
    for index, (asked, count) in enumerate(_levels(tree, heads.sees_draft)):
        if ahead is not None:
            best = candidates(ahead[index], count)
            continue
        path = newest.expand(-1, index + 1).repeat_interleave(asked, dim=0)  # [B · asked, index + 1]
        best = candidates(heads.logits(index, hidden.repeat_interleave(asked, dim=0), path), count)
    best.tolist()  # waits for the device


def measure_costs(
    model: PreTrainedModel,
    heads: HeadsOnTarget,
    trees: Sequence[DraftTree],
    token_ids: Sequence[int],
    *,
    batch_size: int,
    num_tokens: Sequence[int] = VERIFIED_TOKENS,
) -> tuple[VerifyCost, dict[DraftTree, float]]:
    """Cost of target passes over `num_tokens` (1 among them), and of drafting each of `trees`, in steps of one token.

    A step is one new token of each of `batch_size` texts after 64 of context. Texts are cut from `token_ids`. Blocks
    are fed as chains: a tree's mask and positions, some kilobytes, are not timed.
    """
    context = CachedContext(model, passages(token_ids, batch_size, max(num_tokens)))
    newest = context.following[:, :1]

    def run(work: int | DraftTree) -> None:
        if isinstance(work, int):
            context.verify(work)
        else:
            draft(heads, work, context.hidden, newest)

    works: list[int | DraftTree] = [*num_tokens, *trees]
    seconds = interleaved(run, works)
    cost = _curve(batch_size, {n: seconds[n] for n in num_tokens})
    return cost, {tree: seconds[tree] / cost.step_seconds for tree in trees}


def measure_verify_cost(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    *,
    batch_size: int,
    num_tokens: Sequence[int] = VERIFIED_TOKENS,
    rounds: int = _ROUNDS,
    limit: float = _SECONDS,
) -> VerifyCost:
    """Cost of target passes alone, as in `measure_costs`; `rounds` and `limit` as in `interleaved`."""
    context = CachedContext(model, passages(token_ids, batch_size, max(num_tokens)))
    return _curve(batch_size, interleaved(context.verify, num_tokens, rounds=rounds, limit=limit))


def _curve(batch_size: int, seconds: Mapping[int, float]) -> VerifyCost:
    """Seconds by number of tokens, 1 among them, as costs in steps; a warning where they cannot be trusted."""
    step, least = seconds[1], min(seconds.values())
    if least < _NOISE * step:
        logger.warning(
            "batch size %d: a pass over more tokens took %.0f %% of the time of one token's: other work disturbs the "
            "timing, so predicted speeds are not to be trusted; evaluate again on an idle machine",
            batch_size,
            100 * least / step,
        )
    return VerifyCost(batch_size, step, list(seconds), [value / step for value in seconds.values()])


def verify_cost_ratio(cost: VerifyCost, num_tokens: int) -> float:
    """Cost of a pass over `num_tokens`, linear between the measured numbers.

    Raises ValueError beyond these: what lies there is not known.
    """
    if not cost.num_tokens[0] <= num_tokens <= cost.num_tokens[-1]:
        raise ValueError(f"num_tokens {num_tokens}: measured from {cost.num_tokens[0]} to {cost.num_tokens[-1]}")
    return float(np.interp(num_tokens, cost.num_tokens, cost.ratios))
