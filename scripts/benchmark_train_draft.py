"""Measures whole training steps of a draft pruned from the target, by the forward KL, side by side.

    eager       the logits of both models at all positions, then the divergence at the supervised ones
    live        ours: fused with the projection, at the supervised positions; the target runs at each step
    states      ours: the target's states read from disk, as training does by default
    trl_gkd     TRL's GKDTrainer on fixed data (lmbda = 0): its loss, of the logits of both models at all positions
    trl_fused   the loss of TRL's DistillationTrainer: its chunked divergence, at the supervised positions alone.
                The trainer itself cannot take the same rows, since it lets the draft write each one

All share our trainer's loop: rows, order, optimizer, autocast and frozen embeddings. They
take turns in one process for time; memory is the peak of a process of its own for each. Exit status 1 where ours is
slower or larger than another.
"""

import argparse
import gc
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_process import (
    Clock,
    device,
    in_new_process,
    peak_megabytes,
    prepare_process,
    print_requirement,
)
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback
from trl import SFTConfig

from specdist.dataset.examples import training_examples
from specdist.dataset.features import target_states
from specdist.drafter_config import DraftArguments
from specdist.drafters.initial import make_draft_model
from specdist.drafters.vocabulary import shared_vocabulary_size
from specdist.losses import IGNORED, Objective, forward_kl
from specdist.target import Target, open_target, output_projection
from specdist.training.batches import DraftCollator
from specdist.training.draft import DraftTrainer, draft_trainer
from specdist.training.target_output import TargetOutput

OBJECTIVE = Objective({"forward_kl": 1.0})
WAYS = ("eager", "live", "states", "trl_gkd", "trl_fused")
OURS = ("live", "states")


def other_loss(
    way: str, trainer: DraftTrainer, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Tensor
) -> Tensor:
    """The forward KL per supervised token, as another trainer forms it.

    Shapes: B rows, T tokens, S supervised positions, V vocabulary.
    """
    ids, labels = inputs["input_ids"], inputs["labels"][:, 1:]
    if way == "trl_fused":
        return trl_fused_loss(trainer, model, ids, labels != IGNORED, num_items_in_batch)
    draft = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T − 1, V]
    with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
        target = trainer.target.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    if way == "trl_gkd":
        from trl.experimental.gkd import GKDTrainer

        return GKDTrainer.generalized_jsd_loss(draft, target, labels, 0.0, num_items_in_batch=num_items_in_batch)
    supervised = labels != IGNORED
    p, q = (logits[supervised].float().log_softmax(dim=-1) for logits in (target, draft))  # [S, V]
    return forward_kl(p, q).sum() / num_items_in_batch


def trl_fused_loss(trainer: DraftTrainer, model: Any, ids: Tensor, supervised: Tensor, num_items: Tensor) -> Tensor:
    """The loss of TRL's DistillationTrainer. `supervised` [B, T − 1]."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    draft = output.hidden_states[-1][:, :-1][supervised]  # [S, D]
    at = torch.nn.functional.pad(supervised, (0, 1))  # [B, T]: nothing follows the last position
    target = trainer.target.states({"input_ids": ids}, at)
    weights = trainer.model.get_output_embeddings().weight, trainer.target.projection.weight
    with trainer.accelerator.autocast():
        return _chunked_divergence_loss(draft, target, *weights, draft.new_ones(len(draft)), 0.0, num_items)[0]


def synthetic_rows(count: int, max_length: int, num_tokens: int) -> Dataset:
    """Random tokens with the lengths of short chat: prompts of 10 to 200, answers of 30 and more, log-normal."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        prompt, answer = rng.randint(10, min(200, max_length // 2)), 30 + int(rng.lognormvariate(4.5, 0.8))
        ids = [rng.randrange(num_tokens) for _ in range(min(prompt + answer, max_length))]
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:], "prompt_length": prompt})
    return Dataset.from_list(rows)


def choose_rows(args: argparse.Namespace, target: Target) -> Dataset:
    """Rows of all steps, like lengths together, as a trainer groups them; batches in random order."""
    count = (args.steps + 1) * args.batch_rows
    if args.dataset is None:
        rows = synthetic_rows(count, args.max_length, len(target.tokenizer))
    else:
        rows = training_examples(args.dataset, max_length=args.max_length)
        rows = rows.select(random.Random(0).sample(range(len(rows)), count))
    order = sorted(range(count), key=lambda i: len(rows[i]["input_ids"]))
    batches = [order[i : i + args.batch_rows] for i in range(0, count, args.batch_rows)]
    random.Random(1).shuffle(batches)
    return rows.select([i for batch in batches for i in batch])


def make_trainer(way: str, args: argparse.Namespace, target: Target, rows: Dataset) -> DraftTrainer:
    """A trainer of a fresh draft in one of the ways."""
    model = target.load_model(getattr(torch, args.dtype), device())
    states = None
    if way == "states":
        states = target_states(args.states, rows, lambda: model)
    trainer = draft_trainer(
        make_draft_model(DraftArguments(draft_layers=args.layers), target)[0],
        target.tokenizer,
        DraftCollator(rows, target.identity.eos_token_ids[0], states=states),
        SFTConfig(
            output_dir=str(args.states),
            per_device_train_batch_size=args.batch_rows,
            max_steps=args.steps + 1,
            train_sampling_strategy="sequential",
            bf16=args.dtype == "bfloat16",
            activation_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device() == "cpu",
        ),
        num_tokens=shared_vocabulary_size(target),
        objective=OBJECTIVE,
        target=TargetOutput(output_projection(model, target.config), None if states else model),
        freeze_embeddings=True,
    )
    trainer.remove_callback(PrinterCallback)
    if way not in OURS:
        trainer.compute_loss = partial(other_loss, way, trainer)
    return trainer


def train(way: str, args: argparse.Namespace, target: Target, rows: Dataset) -> tuple[float, float]:
    """Seconds and mean loss of the steps after the first."""
    trainer, clock = make_trainer(way, args, target, rows), Clock()
    trainer.add_callback(clock)
    loss = trainer.train().training_loss
    return clock.seconds, loss


def memory(way: str, args: argparse.Namespace) -> tuple[float, float]:
    """Of a process that trains in one way: MB before the first step, and at the peak."""
    target = open_target(args.target)
    trainer = make_trainer(way, args, target, choose_rows(args, target))
    prepare_process(args.threads)  # not before: what loading frees goes back to the system
    gc.collect()
    return peak_megabytes(trainer.train)


def run(args: argparse.Namespace) -> bool:
    """Print tokens per second and memory of each way, and what holds."""
    target = open_target(args.target)
    rows = choose_rows(args, target)
    timed = range(args.batch_rows, len(rows))
    tokens = sum(len(rows[i]["input_ids"]) for i in timed)
    learned = sum(len(rows[i]["input_ids"]) - rows[i]["prompt_length"] for i in timed)
    print(
        f"{args.steps} steps of {args.batch_rows} rows: {tokens} tokens, {learned} supervised; {device()}, {args.dtype}"
    )
    make_trainer("states", args, target, rows)  # writes the states
    peaks = {way: in_new_process(memory, way, args) for way in args.ways}
    prepare_process(args.threads)
    seconds, losses = dict.fromkeys(args.ways, float("inf")), {}
    for _ in range(args.rounds):
        for way in args.ways:
            took, losses[way] = train(way, args, target, rows)
            seconds[way] = min(seconds[way], took)
    for way, (before, peak) in peaks.items():
        print(
            f"{way}: {tokens / seconds[way]:.0f} tokens/s, {learned / seconds[way]:.0f} supervised; "
            f"peak {peak:.0f} MB, {peak - before:.0f} of them by its steps; loss {losses[way]:.4f}"
        )
    held = []
    for way in (w for w in args.ways if w in OURS):
        for other in (w for w in args.ways if w not in OURS):
            held += [
                print_requirement(f"{way}, time beside {other}", seconds[way] / seconds[other], 1.0),
                print_requirement(f"{way}, peak memory beside {other}", peaks[way][1] / peaks[other][1], 1.0),
                print_requirement(
                    f"{way}, difference of loss from {other}", abs(losses[way] / losses[other] - 1), 0.02
                ),
            ]
    return all(held)


def main(arguments: list[str]) -> int:
    """Measure as the command line says. Returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(
        "benchmark.py train-draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    add("--layers", nargs="+", type=int, default=[0, 1, 2, 3], help="of the target, which are the draft's")
    add("--dataset", type=Path, help="directory of a finished dataset; default: random tokens in chat's lengths")
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--steps", type=int, default=3, help="that are timed, after one that is not")
    add("--batch-rows", type=int, default=8)
    add("--max-length", type=int, default=320, help="of a row in tokens")
    add(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float32"],
        help="of target and autocast",
    )
    add("--threads", type=int, help="of the CPU; default: all cores")
    add("--rounds", type=int, default=2)
    args = parser.parse_args(arguments)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as args.states:
        args.states = Path(args.states)
        return 0 if run(args) else 1
