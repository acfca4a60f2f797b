"""Owns the form of every objective that is fused with the projection to the vocabulary: no logits of all positions.

Shapes: H heads (one for a draft model), N supervised positions, C positions of a chunk, D hidden size, R columns of a
low-rank difference, V vocabulary, E events. The eager form is losses.position_losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdist.losses import Objective, Projection, TargetDistributions, position_losses


@dataclass(frozen=True)
class Sizes:
    """How much exists at a time."""

    chunk: int  # positions whose logits do: enough for a matrix product to be at its speed
    tile: int  # logits that are turned into a loss and its gradient: about ten tensors of this size
    block: int  # tokens whose rows of a weight are cast, or of its gradient added to

    def tiles(self, rows: int, vocab_size: int) -> list[slice]:
        """So many rows of logits, a tile at a time."""
        size = max(1, self.tile // vocab_size)
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


CPU = Sizes(chunk=256, tile=1 << 19, block=1 << 12)  # a tile and a block stay in its caches
CPU_OWN = Sizes(chunk=128, tile=1 << 18, block=1 << 10)  # heads' own weights: their gradients leave less memory
# A chunk reads the weight and adds to its whole gradient, and every product is a launch: so few of them
ACCELERATOR = Sizes(chunk=1024, tile=1 << 25, block=1 << 14)


@dataclass(frozen=True)
class _KnownTarget:
    """The target's distributions at a chunk's positions, computed once for all heads: `table` [C, E]."""

    table: Tensor
    source: TargetDistributions

    @property
    def lumps_others(self) -> bool:
        return self.source.lumps_others

    @classmethod
    def of(cls, source: TargetDistributions, tiles: Sequence[slice], temperature: float) -> "_KnownTarget":
        return cls(torch.cat([source.logprobs(tile, temperature) for tile in tiles]), source)

    def part(self, chunk: slice) -> TargetDistributions:
        return _KnownTarget(self.table[chunk], self.source.part(chunk))

    def logprobs(self, chunk: slice, temperature: float) -> Tensor:
        return self.table[chunk]

    def events(self, draft_logprobs: Tensor, chunk: slice) -> Tensor:
        return self.source.events(draft_logprobs, chunk)


@dataclass(frozen=True)
class _Lesson:
    """What is learned at N positions: `labels` [H, N], `counted` [H, N] or None for all, `head_weights` of H.

    `ranks` [H, N], where given, is filled: how many tokens are more probable than the label.
    """

    projections: Sequence[Projection]
    labels: Tensor
    counted: Tensor | None
    objective: Objective
    target: TargetDistributions | None
    head_weights: Sequence[float]
    ranks: Tensor | None = None

    @property
    def own(self) -> bool:
        """Whether heads have weights of their own."""
        return len({id(projection.weight) for projection in self.projections}) > 1

    @property
    def sizes(self) -> Sizes:
        if self.labels.device.type != "cpu":
            return ACCELERATOR
        return CPU_OWN if self.own else CPU

    def factors(self, head: int) -> list[float]:
        """Of each of a head's terms in the weighted sum: numbers, for which no device waits."""
        return [weight * self.head_weights[head] for weight in self.objective.weights.values()]

    def to_gradients(self, head: int, product: Tensor, chunk: slice, target: TargetDistributions | None) -> Tensor:
        """Turn `product` [C, V] of a head into the gradient of the weighted sum by it, in place; the sums [terms]."""
        labels = self.labels[head, chunk]
        counted = None if self.counted is None else self.counted[head, chunk]
        factors = self.factors(head)
        sums = torch.zeros(len(factors), device=product.device)
        for tile in self.sizes.tiles(*product.shape):
            leaf = product[tile].float().requires_grad_()
            with torch.enable_grad():
                logits = self.projections[head].logits(leaf)
                losses = position_losses(self.objective, logits, labels[tile], target, tile)  # [terms, rows]
                terms = (losses if counted is None else losses * counted[tile]).sum(dim=-1)
                loss = sum(factor * term for factor, term in zip(factors, terms, strict=True))
            if self.ranks is not None:
                of_label = logits.detach().gather(-1, labels[tile, None].clamp(min=0))  # [rows, 1]
                self.ranks[head, chunk][tile] = (logits.detach() > of_label).sum(dim=-1)
            product[tile] = torch.autograd.grad(loss, leaf)[0]  # over the logits
            sums += terms.detach()
        return sums


def _add_product(total: Tensor, left: Tensor, right: Tensor, size: int) -> None:
    """Add leftᵀ · right to `total` [V, D], fp32: [C, V], [C, D]. By `size` tokens, whose products caches hold."""
    for start in range(0, len(total), size):
        block = slice(start, start + size)
        total[block] += left[:, block].T @ right


@dataclass
class _Matrices:
    """A head's weight [V, D] and update [V, R], and the sums of the parameters' gradients.

    In the dtype of products, or as the parameters are; then blocks of tokens are cast as they are used.
    """

    weight: Tensor
    update: Tensor | None
    gradients: list[Tensor | None]  # of weight, bias and update, fp32
    block: int  # tokens at a time

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Tokens, and their rows of weight and update in `dtype`: all at once where they have it."""
        size = len(self.weight) if self.weight.dtype == dtype else self.block
        for start in range(0, len(self.weight), size):
            block = slice(start, start + size)
            yield block, self.weight[block].to(dtype), None if self.update is None else self.update[block].to(dtype)

    def product(self, states: Tensor, out: Tensor) -> Tensor:
        """[C, D + R] → [C, V], in `out`."""
        columns = self.weight.shape[1]
        for block, weight, update in self._blocks(states.dtype):
            torch.mm(states[:, :columns], weight.T, out=out[:, block])
            if update is not None:
                out[:, block].addmm_(states[:, columns:], update.T)
        return out

    def backward(self, product: Tensor, states: Tensor, out: Tensor) -> None:
        """From the gradient by the product [C, V]: that by the states [C, D + R] into `out`; add the parameters'."""
        columns = self.weight.shape[1]
        by_states = torch.zeros_like(out, dtype=torch.float32)
        for block, weight, update in self._blocks(states.dtype):
            by_states[:, :columns] += product[:, block] @ weight
            if update is not None:
                by_states[:, columns:] += product[:, block] @ update
        out.copy_(by_states)
        weight_sum, bias_sum, update_sum = self.gradients
        if weight_sum is not None:
            _add_product(weight_sum, product, states[:, :columns], self.block)
        if bias_sum is not None:
            bias_sum += product.sum(dim=0, dtype=torch.float32)
        if update_sum is not None:
            _add_product(update_sum, product, states[:, columns:], self.block)


class _FusedObjective(torch.autograd.Function):
    """The gradient of each chunk is formed with its loss, so that no logits are kept or computed twice.

    After the lesson come the states of each head, then each head's weight, bias and update.
    """

    @staticmethod
    def forward(ctx: Any, lesson: _Lesson, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        heads, sizes, device = len(lesson.projections), lesson.sizes, lesson.labels.device
        hidden, parameters = [t for t in tensors[:heads] if t is not None], tensors[heads:]
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden[0].dtype
        states = [h.to(dtype) for h in hidden]  # [N, D + R] each
        # Heads share one copy of a shared weight; copies of all heads' own would take their memory once more
        cast = {id(t): t if lesson.own else t.to(dtype) for t in parameters if t is not None}
        needed = ctx.needs_input_grad[1 + heads :]
        matrices = []
        for i in range(heads):
            weight, bias, update = parameters[3 * i : 3 * i + 3]
            gradients = [
                torch.zeros_like(t, dtype=torch.float32) if t is not None and wanted else None
                for t, wanted in zip((weight, bias, update), needed[3 * i : 3 * i + 3], strict=True)
            ]
            update = None if update is None else cast[id(update)]
            matrices.append(_Matrices(cast[id(weight)], update, gradients, sizes.block))
        by_hidden = [torch.empty_like(s) for s in states]
        sums = torch.zeros(heads, len(lesson.objective.weights), device=device)
        num, vocab_size = lesson.labels.shape[1], len(matrices[0].weight)
        buffer = states[0].new_empty(min(sizes.chunk, num), vocab_size)
        for start in range(0, num, sizes.chunk):
            chunk = slice(start, min(start + sizes.chunk, num))
            part = None if lesson.target is None else lesson.target.part(chunk)
            if part is not None and heads > 1:
                tiles = sizes.tiles(chunk.stop - start, vocab_size)
                part = _KnownTarget.of(part, tiles, lesson.objective.temperature)
            for i, matrix in enumerate(matrices):
                product = matrix.product(states[i][chunk], buffer[: chunk.stop - start])
                sums[i] += lesson.to_gradients(i, product, chunk, part)
                matrix.backward(product, states[i][chunk], by_hidden[i][chunk])
            del part  # before the next one is made
        ctx.save_for_backward(*by_hidden, *(gradient for matrix in matrices for gradient in matrix.gradients))
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.mark_non_differentiable(sums)
        weighted = (
            factor * term for i in range(heads) for factor, term in zip(lesson.factors(i), sums[i], strict=True)
        )
        return torch.stack(list(weighted)).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (  # in place: the graph is walked once
            None if gradient is None else gradient.mul_(grad_output).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (None, *gradients)


def heads_objective(
    hidden: Sequence[Tensor],
    projections: Sequence[Projection],
    labels: Tensor,
    objective: Objective,
    target: TargetDistributions | None = None,
    *,
    counted: Tensor | None = None,
    head_weights: Sequence[float] | None = None,
    ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ over H and N of the weighted losses, without the logits of all positions at once: [], and each sum [H, terms].

    `hidden`: of each head [N, D], whose logits its projection gives; parameters get gradients where they ask for them.
    `labels` [H, N], IGNORED where there is none; `counted` [H, N]: what enters at all. `target` is needed by
    divergences; position n is the same for all heads, so its distribution is computed once. `head_weights`: 1 for each
    unless given. `ranks` [H, N], integers, is filled: how many tokens are more probable than the label. Products are
    taken in autocast's dtype, all else in fp32. The caller divides by the global number of supervised tokens. Fused as
    in "cut cross-entropy" (Wijmans et al. 2024) and Liger, for any objective, in torch.
    Raises ValueError where a divergence has no target.
    """
    if objective.needs_target and target is None:
        raise ValueError(f"objective {list(objective.weights)}: divergences need the target's distributions, got none")
    lesson = _Lesson(projections, labels, counted, objective, target, head_weights or [1.0] * len(projections), ranks)
    parameters = [t for p in projections for t in (p.weight, p.bias, p.update)]
    return _FusedObjective.apply(lesson, *hidden, *parameters)


def linear_objective(
    hidden: Tensor,
    projection: Projection,
    labels: Tensor,
    objective: Objective,
    target: TargetDistributions | None = None,
) -> tuple[Tensor, Tensor]:
    """`heads_objective` of a single projection: `hidden` [N, D], `labels` [N] → the sum [], and each loss's [terms]."""
    total, sums = heads_objective([hidden], [projection], labels[None], objective, target)
    return total, sums[0]
