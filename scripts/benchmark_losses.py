"""Measures every objective fused with the projection, against its eager form and against TRL's kernels.

Time is of a forward and a backward pass: the best of some rounds in which all ways take turns. Memory is the peak
beyond the inputs, each in a process of its own. TRL's chunked divergence has our convention of β: m = β p + (1 − β) q,
β KL(p ‖ m) + (1 − β) KL(q ‖ m), and the forward and the reverse KL at its ends. The exit status is 1 where a
requirement does not hold.

    python scripts/benchmark.py losses
    python scripts/benchmark.py losses --ways chunked --positions 1024 2048 4096 8192    memory by number of tokens
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial

import torch
from benchmark_process import device, in_new_process, peak_megabytes, prepare_process, print_requirement
from torch import Tensor

from specdist.fused_losses import linear_objective
from specdist.losses import FullTarget, Objective, Projection, position_losses
from specdist.objective import CROSS_ENTROPY, DIVERGENCES

MIXTURE = "mixture"
OBJECTIVES = {name: Objective({name: 1.0}) for name in (CROSS_ENTROPY, *DIVERGENCES)} | {
    MIXTURE: Objective({CROSS_ENTROPY: 0.2, "forward_kl": 0.3, "negative_log_acceptance": 1.0})
}
TRL_BETA = {"forward_kl": 0.0, "jensen_shannon": 0.5, "reverse_kl": 1.0}
TRL_VOCABULARY_CHUNK = 32768  # tokens, as its trainers have it
TINY = 16  # positions, sizes and tokens of a first call, which loads libraries
MEMORY_LIMIT, TIME_LIMIT = 1 / 8, 1.1  # beside eager
GROWTH_LIMIT = 0.25  # rows of fp32 logits per position, which leaves room for what an allocator does
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}  # of values


@dataclass(frozen=True)
class Case:
    """One measurement."""

    objective: str
    way: str  # eager, chunked or trl
    positions: int
    hidden: int
    vocab: int
    dtype: str
    train_projection: bool
    threads: int | None


@dataclass(frozen=True)
class Inputs:
    """Of both models; the draft's weights are in fp32, as a trainer keeps them."""

    hidden: Tensor
    projection: Projection
    labels: Tensor
    target: FullTarget


def make_inputs(case: Case) -> Inputs:
    """Random states whose distributions have an entropy of some nats, and a draft that resembles the target."""
    torch.manual_seed(0)
    dtype, size = getattr(torch, case.dtype), (case.positions, case.hidden)
    weight = torch.randn(case.vocab, case.hidden, device=device()) * (3.0 / case.hidden**0.5)
    states = torch.randn(size, device=device()).to(dtype)
    hidden = (states + 0.5 * torch.randn(size, device=device(), dtype=dtype)).requires_grad_()
    labels = torch.randint(case.vocab, (case.positions,), device=device())
    target = FullTarget(states, Projection(weight.to(dtype)))
    return Inputs(hidden, Projection(weight.requires_grad_(case.train_projection)), labels, target)


def eager(inputs: Inputs, objective: Objective) -> Tensor:
    """The logits of both models at all positions, then the objective's own formula."""
    logits = inputs.projection.logits(inputs.hidden @ inputs.projection.weight.T)
    target = inputs.target if objective.needs_target else None
    terms = position_losses(objective, logits, inputs.labels, target, slice(None)).sum(dim=-1)
    return (terms * torch.tensor(list(objective.weights.values()), device=terms.device)).sum()


def chunked(inputs: Inputs, objective: Objective) -> Tensor:
    target = inputs.target if objective.needs_target else None
    return linear_objective(inputs.hidden, inputs.projection, inputs.labels, objective, target)[0]


def trl(inputs: Inputs, objective: Objective) -> Tensor:
    """TRL's kernels: the chunked divergence, and chunked log-probabilities for the cross-entropy."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden, weight, target = inputs.hidden, inputs.projection.weight, inputs.target
    (name,) = objective.weights
    if name == CROSS_ENTROPY:
        chunk = min(TRL_VOCABULARY_CHUNK, len(weight))
        return -ChunkedLogProbFunction.apply(hidden, weight, None, inputs.labels, 1.0, chunk, None, 1.0, ())[0].sum()
    theirs = target.hidden, target.projection.weight, None
    return ChunkedDivergenceFunction.apply(hidden, weight, None, *theirs, TRL_BETA[name])[0].sum()


WAYS = {"eager": eager, "chunked": chunked, "trl": trl}


def step(case: Case, inputs: Inputs) -> float:
    """Forward and backward, as a trainer calls them. Returns the loss per position."""
    with torch.autocast(device(), torch.bfloat16, enabled=case.dtype == "bfloat16"):
        loss = WAYS[case.way](inputs, OBJECTIVES[case.objective])
    loss.backward()
    inputs.hidden.grad = inputs.projection.weight.grad = None
    return float(loss.detach()) / case.positions


def memory(case: Case) -> float:
    """Peak beyond the inputs in MB, in a process of its own."""
    inputs = make_inputs(case)
    prepare_process(case.threads)  # not before: what making them frees goes back to the system, and is not used again
    tiny = Case(case.objective, case.way, TINY, TINY, TINY, case.dtype, case.train_projection, case.threads)
    step(tiny, make_inputs(tiny))
    before, peak = peak_megabytes(partial(step, case, inputs))
    return peak - before


def gradients(case: Case) -> float:
    """Size of the gradients in MB, which any way needs."""
    hidden = case.positions * case.hidden * getattr(torch, case.dtype).itemsize
    return (hidden + 4 * case.vocab * case.hidden * case.train_projection) / 1e6


def times(cases: list[Case], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Best seconds of each way, and its loss. All take turns; the first round warms up."""
    prepare_process(cases[0].threads)
    inputs = make_inputs(cases[0])
    best, losses = {case.way: float("inf") for case in cases}, {}
    for number in range(rounds + 1):
        for case in cases:
            began = time.perf_counter()
            losses[case.way] = step(case, inputs)  # read from the device, which waits for it
            if number:
                best[case.way] = min(best[case.way], time.perf_counter() - began)
    return best, losses


def compare(cases: list[Case], rounds: int) -> bool:
    """Measure one objective at one size in all ways, and print what holds."""
    peaks = {case.way: in_new_process(memory, case) for case in cases}
    seconds, losses = in_new_process(times, cases, rounds)
    name, first = cases[0].objective, cases[0]
    for way in peaks:
        others = "".join(
            f", {seconds[way] / seconds[o]:.2f} of {o}'s time, {peaks[way] / peaks[o]:.3f} of its memory"
            for o in ("eager", "trl")
            if o in peaks and o != way
        )
        print(
            f"{name}, {first.positions} positions, {way}: {seconds[way] * 1e3:.0f} ms, {peaks[way]:.0f} MB "
            f"({gradients(first):.0f} of them gradients), loss {losses[way]:.5f}{others}",
            flush=True,
        )
    held = [True]
    if "chunked" in peaks:
        for other in (w for w in ("eager", "trl") if w in peaks):
            limits = (TIME_LIMIT, MEMORY_LIMIT) if other == "eager" else (1.0, 1.0)
            error = abs(losses["chunked"] / losses[other] - 1.0)
            held += [
                print_requirement(f"{name}, time beside {other}", seconds["chunked"] / seconds[other], limits[0]),
                print_requirement(f"{name}, memory beside {other}", peaks["chunked"] / peaks[other], limits[1]),
                print_requirement(f"{name}, difference of values from {other}", error, TOLERANCE[first.dtype]),
            ]
    return all(held)


def growth(cases: list[Case]) -> bool:
    """Print what a further position takes beyond its gradient, in rows of fp32 logits [V], and judge ours by it."""
    rest = [in_new_process(memory, case) - gradients(case) for case in cases]
    for case, peak in zip(cases, rest, strict=True):
        print(
            f"{case.objective}, {case.positions} positions, {case.way}: {peak:.0f} MB beyond the gradients", flush=True
        )
    first, last = cases[0], cases[-1]
    logits = (last.positions - first.positions) * 4 * first.vocab / 1e6
    rows = (rest[-1] - rest[0]) / logits
    words = f"{first.objective}, {first.way}, rows of logits per position"
    if first.way == "chunked":
        return print_requirement(words, rows, GROWTH_LIMIT)
    print(f"{words}: {rows:.3f}")
    return True


def main(arguments: list[str]) -> int:
    """Measure as the command line says. Returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(
        "benchmark.py losses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    add("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    add("--positions", nargs="+", type=int, default=[4096], help="supervised tokens; several: memory by their number")
    add("--hidden", type=int, default=576)
    add("--vocab", type=int, default=49152)
    add("--dtype", default="bfloat16", choices=list(TOLERANCE), help="bfloat16: by autocast, with the draft in fp32")
    add("--train-projection", action="store_true", help="the projection's weight gets a gradient too")
    add("--threads", type=int, help="of the CPU; default: all cores")
    add("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    print(f"{device()}, {args.dtype}, projection {'trained' if args.train_projection else 'frozen'}", flush=True)
    held = []
    for name in args.objectives:
        rows = {
            way: [
                Case(name, way, n, args.hidden, args.vocab, args.dtype, args.train_projection, args.threads)
                for n in sorted(args.positions)
            ]
            for way in args.ways
            if way != "trl" or name in (CROSS_ENTROPY, *TRL_BETA)
        }
        if len(args.positions) > 1:
            held += [growth(cases) for cases in rows.values()]
        else:
            held.append(compare([cases[0] for cases in rows.values()], args.rounds))
    return 0 if all(held) else 1
