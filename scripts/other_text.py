"""Writes a dataset of answers that the target did not write, to measure what its own text is worth.

    python scripts/other_text.py OUTPUT --prompts FILE … [--num-tokens N]

Each prompt's text is cut in two: the first half is the question, the second the answer. Its form is that of any
dataset, and its manifest says that no target wrote it.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from specdist.dataset.distill import build_dataset
from specdist.dataset.manifest import GIVEN_ENGINE
from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.dataset.render import Renderer
from specdist.generation.engine import Answer, Request
from specdist.schema import ChatFormat, DatasetInputs, Prompt, SamplingSpec
from specdist.target import open_target

logger = logging.getLogger(__name__)


class GivenAnswers:
    """An engine that answers with given token ids, found by the ids of the prompt."""

    name, context_length = f"{GIVEN_ENGINE} 1", None

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.given = answers

    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """See Engine."""
        while (request := next_request()) is not None:
            ids = self.given[tuple(request.prompt_ids)]
            limit = request.sampling.max_new_tokens
            yield Answer(request, ids[:limit], "length" if len(ids) > limit else "stop")

    def close(self) -> None:
        """See Engine."""


def halves(prompts: list[Prompt]) -> Iterator[tuple[Prompt, str]]:
    """Each single-turn prompt of 40 words or more as a question and its answer."""
    for prompt in prompts:
        words = prompt.messages[-1]["content"].split(" ")
        if len(prompt.messages) == 1 and len(words) >= 40:
            middle = len(words) // 2
            question = [{"role": "user", "content": " ".join(words[:middle])}]
            yield Prompt(**{**vars(prompt), "messages": question}), " ".join(words[middle:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--num-tokens", type=int, default=200_000, help="stop when the answers have so many")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target, renderer_format = open_target(args.target), ChatFormat()
    renderer = Renderer(target.tokenizer, renderer_format)
    pool, _ = prepare_prompts(PromptMix(args.prompts), PromptMix([]), directory=args.output.parent / "prompts")
    eos = target.tokenizer.eos_token_id
    chosen: list[Prompt] = []
    given: dict[tuple[int, ...], list[int]] = {}
    num_tokens = 0
    for question, answer in halves(list(pool)):
        if num_tokens >= args.num_tokens:
            break
        ids = [*target.tokenizer(answer, add_special_tokens=False)["input_ids"], eos]
        chosen.append(question)
        given[tuple(renderer.encode(renderer.prepared(question.messages)))] = ids
        num_tokens += min(len(ids), args.max_new_tokens)
    inputs = DatasetInputs(
        target=target.identity,
        prompts_sha256=pool.sha256,
        chat_format=renderer_format,
        samplings=[SamplingSpec(max_new_tokens=args.max_new_tokens)],
        max_prompt_tokens=768,
        context_length=target.context_length or 2048,
        engine=GIVEN_ENGINE,
        dtype="none",
        seed=0,
        num_top_logprobs=0,
    )
    manifest = build_dataset(args.output, inputs, chosen, renderer, lambda: GivenAnswers(given))
    logger.info("%s: %d answers, %d tokens", args.output, manifest.num_rows, manifest.num_completion_tokens)


if __name__ == "__main__":
    sys.exit(main())
