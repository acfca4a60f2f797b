"""Measures optimizer steps of Medusa heads by the cross-entropy: the published approach written plainly, and ours.

    plain                   documents padded to the maximum length; the target runs on everything; each head has a
                            projection of its own, all heads' logits are stacked at all positions in fp32, then a
                            cross-entropy per head with labels shifted by 2 + i; the sum of decay^i times its mean
    plain, autocast         the same with its products in bfloat16, as ours are; not with --dtype float32
    liger                   the same with Liger's fused linear cross-entropy per head; on CUDA alone
    own, low_rank, shared   ours, by the head's projection: HeadsTrainer's whole steps with its batches of like lengths
    …, cached states        ours, with the target's states read from disk; making them, once, is not timed
    target's pass alone     what of ours is the target's, without any heads: no form whose target runs can be faster

All learn the same documents: random tokens with the lengths of rendered dialogues. Each way has the number of documents
per batch that suits it, since what counts is time per supervised token (of the answers, counted alike for all). The
target is in --dtype, heads are in fp32, and AdamW is torch's fused one, for all; products are in --dtype, of plain in
fp32. Each way has a process of its own; they take turns, and the best round counts. Memory is the highest peak of a
step beyond what exists before it: heads, target and AdamW's moments.

First the losses and gradients of plain and own are compared in fp32; the exit status is 1, and nothing is measured,
where they differ. It is 1 too where a requirement (at 4 heads) does not hold.

    python scripts/benchmark.py train-heads --heads 2 4 8
"""

import argparse
import gc
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmark_plain_heads import PlainHeads, liger_sums, plain_batches, plain_states, plain_sums
from benchmark_process import (
    Clock,
    OwnProcess,
    StepMemory,
    device,
    give_back_freed_memory,
    in_new_process,
    prepare_process,
    print_requirement,
)
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from specdist.dataset.features import target_states
from specdist.drafter_config import LOW_RANK, MEDUSA, OWN, SHARED, HeadsArguments
from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.losses import IGNORED, Objective
from specdist.objective import CROSS_ENTROPY
from specdist.target import Target, open_target, output_projection
from specdist.training.heads import HeadsCollator, HeadsTrainer, heads_trainer
from specdist.training.target_output import TargetOutput

PLAIN, PLAIN_CAST, LIGER = "plain", "plain, autocast", "liger"
OWN_CACHED, CACHED = "own, cached states", "shared, cached states"
TARGET_ALONE = "target's pass alone"
OURS = {OWN: OWN, LOW_RANK: LOW_RANK, SHARED: SHARED, OWN_CACHED: OWN, CACHED: SHARED}  # the projection of each way
DEFAULTS = HeadsArguments()
DECAY, RANK = DEFAULTS.head_loss_decay, DEFAULTS.head_projection_rank
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5  # of the difference of loss and gradients, relative to their size
REQUIRED_HEADS = 4
TIME_LIMITS = {OWN: 1 / 5, SHARED: 1 / 8, CACHED: 1 / 12}  # beside plain
MEMORY_LIMITS = {OWN: 1 / 4, SHARED: 1 / 10, CACHED: 1 / 10}
# Tokens of prompt and answer in SmolLM2's chat template, answers of at most 96: every 84th of 2678 dialogues of the
# demo's training prompts that fit into 512, sorted by their sum
LENGTHS = [
    *((42, 23), (41, 42), (37, 59), (75, 32), (113, 8), (41, 93), (41, 96), (124, 15)),
    *((49, 96), (58, 96), (119, 44), (77, 96), (125, 57), (96, 96), (107, 96), (139, 74)),
    *((128, 96), (182, 54), (151, 96), (159, 96), (168, 96), (210, 63), (189, 96), (203, 96)),
    *((217, 96), (234, 96), (250, 96), (270, 96), (290, 96), (323, 96), (379, 96), (448, 64)),
]


def documents(args: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    """Random tokens in the mix of LENGTHS, those of like lengths together; answers are cut at the maximum length."""
    count, longest, num_tokens = args.documents, args.max_length, len(target.tokenizer)
    fitting = [(prompt, min(answer, longest - prompt)) for prompt, answer in LENGTHS if prompt < longest]
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(count):
        prompt, answer = fitting[int((i + 0.5) * len(fitting) / count)]
        ids = torch.randint(num_tokens, (prompt + answer,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:], "prompt_length": prompt})
    return rows


def supervised_tokens(rows: list[dict[str, Any]]) -> int:
    """Tokens of all answers."""
    return sum(len(row["input_ids"]) - row["prompt_length"] for row in rows)


def train_plainly(way: str, num_heads: int, args: argparse.Namespace, target: Target, meter: TrainerCallback) -> None:
    """Train fresh heads on the first documents, which warms up, and then on all. `meter` sees each step."""
    model = load_model(args, target)
    heads = PlainHeads(num_heads, output_projection(model, target.config).weight).to(device())
    optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    rows = documents(args, target)
    head_sums = liger_sums if way == LIGER else plain_sums
    for batch in plain_batches(rows[: args.plain_rows] + rows, args.plain_rows, args.max_length):
        meter.on_step_begin(None, None, None)
        hidden = plain_states(model, batch)
        with torch.autocast(device(), torch.bfloat16, enabled=args.dtype == "bfloat16" and way != PLAIN):
            sums = head_sums(heads, hidden, batch["labels"])
        loss = sum(DECAY**i * total / count.clamp(min=1) for i, (total, count) in enumerate(sums))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.on_step_end(None, None, None)


def load_model(args: argparse.Namespace, target: Target) -> PreTrainedModel:
    return target.load_model(getattr(torch, args.dtype), device())


def make_trainer(
    way: str,
    num_heads: int,
    args: argparse.Namespace,
    target: Target,
    rows: list[dict[str, Any]],
) -> HeadsTrainer:
    """A trainer of fresh heads, which takes `rows` in their order."""
    model, examples = load_model(args, target), Dataset.from_list(rows)
    projection, states = output_projection(model, target.config), None
    vocab_size, hidden_size = projection.weight.shape
    if way in (OWN_CACHED, CACHED):
        states = target_states(args.directory / "states", examples, lambda: model)
    form = OURS[way]
    heads = DraftHeads(HeadsShape(num_heads, 1, hidden_size, vocab_size, MEDUSA, form, RANK if form == LOW_RANK else 0))
    heads.copy_projection(projection.weight)
    trainer = heads_trainer(
        heads,
        HeadsCollator(examples, target.identity.eos_token_ids[0], states=states),
        training_arguments(args),
        objective=Objective({CROSS_ENTROPY: 1.0}),
        target=TargetOutput(projection, None if states else model),
        decay=DECAY,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """One pass over the documents in their order, with the optimizer of `train_plainly`."""
    return TrainingArguments(
        output_dir=str(args.directory),
        per_device_train_batch_size=args.batch_rows,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=0.0,
        bf16=args.dtype == "bfloat16",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device() == "cpu",
    )


def train(way: str, num_heads: int, args: argparse.Namespace, meter: TrainerCallback) -> None:
    """Train fresh heads in one way: a step that warms up, then one pass over all documents."""
    target = open_target(args.target)
    if way in (PLAIN, PLAIN_CAST, LIGER):
        return train_plainly(way, num_heads, args, target, meter)
    rows = documents(args, target)
    trainer = make_trainer(
        SHARED if way == TARGET_ALONE else way, num_heads, args, target, rows[: args.batch_rows] + rows
    )
    if way == TARGET_ALONE:
        return run_target(trainer, meter)
    trainer.add_callback(meter)
    trainer.train()


def run_target(trainer: HeadsTrainer, meter: TrainerCallback) -> None:
    """The target's part of the trainer's steps."""
    for batch in trainer.get_train_dataloader():
        meter.on_step_begin(None, None, None)
        trainer.target.states(batch, batch["positions"])
        meter.on_step_end(None, None, None)


class Way:
    """One way in its process."""

    def __init__(self, name: str, num_heads: int, args: argparse.Namespace) -> None:
        prepare_process(args.threads)
        self.arguments = name, num_heads, args

    def seconds(self) -> float:
        """Of one pass over the documents, after a step that warms up."""
        clock = Clock()
        self._train(clock)
        return clock.seconds

    def megabytes(self) -> float:
        """The highest peak of a step beyond what exists before it."""
        memory = StepMemory()
        self._train(memory)
        return memory.peak

    def _train(self, meter: TrainerCallback) -> None:
        train(*self.arguments, meter)
        gc.collect()  # the trainer is a cycle
        give_back_freed_memory()  # to those whose turn it is


def measure(ways: list[str], num_heads: int, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """The best seconds of each way and its megabytes, all with so many heads; they take turns."""
    with ExitStack() as stack:
        processes = {way: stack.enter_context(OwnProcess(Way, way, num_heads, args)) for way in ways}
        peaks = {way: process.call("megabytes") for way, process in processes.items()}
        rounds = [{way: process.call("seconds") for way, process in processes.items()} for _ in range(args.rounds)]
    return {way: min(taken[way] for taken in rounds) for way in ways}, peaks


def differences(num_heads: int, args: argparse.Namespace) -> tuple[float, float]:
    """How far plain and own are apart on two documents in fp32, relative to their size: the loss, and the gradient of
    the parameter where it is most (in the norm)."""
    prepare_process(args.threads)
    args.dtype, args.batch_rows = "float32", 2
    target = open_target(args.target)
    rows = documents(args, target)[:2]
    trainer = make_trainer(OWN, num_heads, args, target, rows)
    ours, model = trainer.model, trainer.target.model
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():  # away from zero, where all heads are alike
        parameter.data += (0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.device)
    plain = PlainHeads(num_heads, trainer.target.projection.weight).to(device())
    plain.load_state_dict(ours.state_dict())

    num_tokens = supervised_tokens(rows)
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(ours, batch, num_items_in_batch=num_tokens)
    (batch,) = plain_batches(rows, 2, max(len(row["input_ids"]) for row in rows))
    sums = plain_sums(plain, plain_states(model, batch), batch["labels"])
    wanted = sum(DECAY**i * total for i, (total, _) in enumerate(sums)) / num_tokens
    loss.backward()
    wanted.backward()
    apart = [
        ((one.grad - other.grad).norm() / other.grad.norm()).item()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True)
    ]
    return abs(loss.item() / wanted.item() - 1), max(apart)


def check(num_heads: int, args: argparse.Namespace) -> bool:
    """Print whether plain and own are the same step."""
    loss, gradient = in_new_process(differences, num_heads, args)
    held = [
        print_requirement(f"{num_heads} heads, difference of loss of own and plain", loss, TOLERANCE),
        print_requirement(f"{num_heads} heads, largest difference of gradients of own and plain", gradient, TOLERANCE),
    ]
    return all(held)


def compare(ways: list[str], num_heads: int, tokens: int, args: argparse.Namespace) -> bool:
    """Print a row of each way, and what is required of them."""
    seconds, peaks = measure(ways, num_heads, args)
    for way in ways:
        print(
            f"| {num_heads} | {way} | {tokens / seconds[way]:.1f} | {seconds[PLAIN] / seconds[way]:.2f} "
            f"| {peaks[way]:.0f} | {peaks[way] / peaks[PLAIN]:.3f} |",
            flush=True,
        )
    return num_heads != REQUIRED_HEADS or judge(seconds, peaks)


def judge(seconds: dict[str, float], peaks: dict[str, float]) -> bool:
    """Print whether ours take as little as they should."""
    held = []
    for what, values, limits in (("time", seconds, TIME_LIMITS), ("extra peak memory", peaks, MEMORY_LIMITS)):
        for way in [way for way in limits if way in values]:
            words = f"{REQUIRED_HEADS} heads, {way}, {what} beside plain"
            held.append(print_requirement(words, values[way] / values[PLAIN], limits[way]))
    return all(held)


def run(args: argparse.Namespace) -> bool:
    """Check that plain and own are the same step, then measure at each number of heads."""
    if not all([check(num_heads, args) for num_heads in args.heads]):
        return False
    ways = [PLAIN, *([PLAIN_CAST] if args.dtype == "bfloat16" else []), *OURS, TARGET_ALONE]
    if args.ways:
        ways = [way for way in ways if way == PLAIN or way in args.ways]
    if device() == "cuda" and find_spec("liger_kernel"):
        ways.insert(ways.index(OWN), LIGER)
    elif device() == "cuda":
        print("liger is left out: liger_kernel is not installed")
    rows = documents(args, open_target(args.target))
    tokens = supervised_tokens(rows)
    print(
        f"{len(rows)} documents of {sum(len(row['input_ids']) for row in rows)} tokens, {tokens} of them supervised; "
        f"batches of {args.plain_rows} padded to {args.max_length} (plain), of {args.batch_rows} (ours); "
        f"{device()}, {args.dtype}\n\n"
        "| heads | way | supervised tokens/s | times plain's | extra peak memory (MB) | share of plain's |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    return all([compare(ways, num_heads, tokens, args) for num_heads in args.heads])


def main(arguments: list[str]) -> int:
    """Measure as the command line says. Returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(
        "benchmark.py train-heads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    add("--heads", nargs="+", type=int, default=[REQUIRED_HEADS])
    add("--ways", nargs="+", choices=[PLAIN_CAST, LIGER, *OURS, TARGET_ALONE], help="only these beside plain")
    add("--documents", type=int, default=16, help="that each way learns in a round; a multiple of both batches")
    add("--max-length", type=int, default=512, help="of a document in tokens, to which plain pads")
    add("--plain-rows", type=int, default=1, help="documents of plain's batch")
    add("--batch-rows", type=int, default=4, help="documents of our batch")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of target and autocast")
    add("--threads", type=int, help="of the CPU; default: all cores")
    add("--rounds", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.documents % args.plain_rows or args.documents % args.batch_rows:
        parser.error(f"--documents {args.documents}: no multiple of {args.plain_rows} and {args.batch_rows}")
    if args.max_length <= min(prompt for prompt, _ in LENGTHS):
        parser.error(f"--max-length {args.max_length}: no document has so short a prompt")
    with tempfile.TemporaryDirectory() as directory:
        args.directory = Path(directory)
        return 0 if run(args) else 1
