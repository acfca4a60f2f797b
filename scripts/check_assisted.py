"""Owns the check that transformers' own assisted generation serves an exported draft model without a word of ours.

    python scripts/check_assisted.py --target smollm2-135m --draft runs/registry/smollm2-135m-draft/aliases/champion

Target and export are opened by transformers alone and answer the same prompts greedily, with the export as
`assistant_model` and without. Exit status 1 where a token differs, but at a near-tie of the target's logits.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist.dataset.prompts import PromptSet
from specdist.dataset.render import Renderer
from specdist.errors import SpecdistError
from specdist.evaluation.certify import first_divergence
from specdist.schema import ChatFormat, DistillRow, Divergence, SamplingSpec
from specdist.target import open_target


@dataclass(frozen=True)
class Assisted:
    """Answers with the assistant beside those without, and what both took."""

    num_tokens: int
    num_passes: int  # of the target, with the assistant
    seconds: float
    seconds_alone: float
    divergences: list[Divergence]


def _timed(model: PreTrainedModel, prompt_ids: list[int], options: dict[str, object]) -> tuple[list[int], int, float]:
    """The answer's tokens, the passes of `model` that they took, and the seconds."""
    passes, began = 0, time.monotonic()

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count)
    ids = torch.tensor([prompt_ids], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    hook.remove()
    return output[0, len(prompt_ids) :].tolist(), passes, time.monotonic() - began


def compare(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: dict[str, list[int]], max_new_tokens: int
) -> Assisted:
    """Greedy answers to `prompts` (token ids by name), with `draft` as the assistant and without."""
    tokens, passes, seconds, alone = 0, 0, 0.0, 0.0
    divergences = []
    for name, prompt_ids in prompts.items():
        options: dict[str, object] = {"max_new_tokens": max_new_tokens}
        expected, _, plain = _timed(target, prompt_ids, options)
        got, count, assisted = _timed(target, prompt_ids, {**options, "assistant_model": draft})
        row = DistillRow(name, name, 0, 0, "", prompt_ids, expected, "length", SamplingSpec(), 0)
        if found := first_divergence(target, row, expected, got):
            divergences.append(found)
        tokens, passes, seconds, alone = tokens + len(got), passes + count, seconds + assisted, alone + plain
    return Assisted(tokens, passes, seconds, alone, divergences)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the program."""
    parser = argparse.ArgumentParser(description="Assisted generation of transformers with an exported draft model.")
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face id, directory, or the demo's name")
    add("--draft", type=Path, required=True, help="an exported draft model: aliases/champion, or a run's export")
    add("--prompts", type=Path, default=Path("data/prompts/eval"), help="a prompt set (default: %(default)s)")
    add("--num-prompts", type=int, default=12, metavar="N", help="how many of them (default: %(default)s)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    """Exit status of the command."""
    args = parse_arguments()
    try:
        target = open_target(args.target)
        renderer = Renderer(target.tokenizer, ChatFormat())
        prompts = {p.id: renderer.encode(p.messages) for p in islice(PromptSet.open(args.prompts), args.num_prompts)}
    except SpecdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dtype = getattr(torch, args.dtype)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval() for path in (target.path, args.draft)]
    result = compare(*models, prompts, args.max_new_tokens)
    real = [d for d in result.divergences if not d.near_tie]
    print(f"{args.draft}: assistant_model of {target.path}, {args.dtype}, {len(prompts)} prompts, greedy")
    print(f"  tokens per pass of the target {result.num_tokens / result.num_passes:.2f}")
    speeds = [result.num_tokens / seconds for seconds in (result.seconds, result.seconds_alone)]
    print(f"  tokens per second {speeds[0]:.1f}, by the target alone {speeds[1]:.1f}")
    print(f"  answers with the target's own tokens {len(prompts) - len(result.divergences)} of {len(prompts)}")
    for d in result.divergences:
        print(f"    {d.prompt_id}: differs from token {d.position} on, logit gap {d.logit_gap:.4f}")
    return 1 if real else 0


if __name__ == "__main__":
    sys.exit(main())
