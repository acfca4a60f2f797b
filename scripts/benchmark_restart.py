"""Times a restart over a large dataset that is nearly finished, from the start of its process to the first request.

    python scripts/benchmark_restart.py --rows 1000000

Prompts and rows are synthetic, everything that reads and writes them is the data stage's own; the embedded engine is
replaced by one that writes random tokens, since a million real answers would take days here.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmark_prompts import peak_megabytes, synthetic_rows

from specdist.dataset.distill import build_dataset
from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.dataset.render import Renderer
from specdist.generation.engine import Answer, Request
from specdist.schema import ChatFormat, DatasetInputs, SamplingSpec
from specdist.target import open_target

ANSWER_TOKENS = 60
STARTED = "SPECDIST_BENCHMARK_STARTED"


class Enough(Exception):
    """The engine has written what it was to write."""


class RandomEngine:
    """Writes random tokens for `count` requests, then fails as a killed process would end."""

    name, context_length = "random 1", None

    def __init__(self, count: int, first_request: Callable[[], None] = lambda: None) -> None:
        self.count, self.first_request = count, first_request

    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """See engine.Engine."""
        for number in range(self.count + 1):
            request = next_request()
            if number == 0:
                self.first_request()
            if request is None:
                return
            if number == self.count:
                raise Enough
            rng = random.Random(request.seed)
            ids = [rng.randrange(100, 40_000) for _ in range(ANSWER_TOKENS)]
            yield Answer(request, ids, "length")

    def close(self) -> None:
        """Nothing to give back."""


def run(directory: Path, target_name: str, engine: RandomEngine) -> None:
    """What the data stage does: prompts, plan, what is still to do, writing."""
    train, _ = prepare_prompts(
        PromptMix([str(directory / "rows.jsonl")]), PromptMix([]), directory=directory / "prompts", eval_fraction=0.001
    )
    target = open_target(target_name)
    inputs = DatasetInputs(
        target=target.identity,
        prompts_sha256=train.sha256,
        chat_format=ChatFormat(),
        samplings=[SamplingSpec(max_new_tokens=ANSWER_TOKENS)],
        max_prompt_tokens=2048,
        context_length=8192,
        engine="random",
        dtype="none",
        seed=0,
        num_top_logprobs=0,
    )
    renderer = Renderer(target.tokenizer, inputs.chat_format)
    try:
        build_dataset(directory / "data", inputs, train, renderer, lambda: engine, shard_rows=1024)
    except Enough:
        return


def main() -> None:
    """Write the rows, then start a new process over them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="finished before the restart")
    parser.add_argument("--target", default="smollm2-135m", help="whose tokenizer renders the prompts")
    parser.add_argument("--directory", type=Path, help="where its files lie for a while; default: a temporary one")
    parser.add_argument("--restart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.restart:
        started = float(os.environ[STARTED])
        engine = RandomEngine(0, lambda: print(f"first request after {time.time() - started:.1f} s", flush=True))
        run(args.directory, args.target, engine)
        print(f"peak memory of the restart: {peak_megabytes():.0f} MB")
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory, began = Path(name), time.monotonic()
        with (directory / "rows.jsonl").open("w", encoding="utf-8") as output:
            spare = args.rows // 10 + 2000  # duplicates and bad rows are dropped, some prompts stay to be answered
            output.writelines(f"{line}\n" for line in synthetic_rows(args.rows + spare, 60, Counter()))
        run(directory, args.target, RandomEngine(args.rows))
        print(f"{args.rows} rows written in {time.monotonic() - began:.0f} s", flush=True)
        command = [sys.executable, __file__, "--restart", "--target", args.target, "--directory", name]
        subprocess.run(command, check=True, env={**os.environ, STARTED: str(time.time())})


if __name__ == "__main__":
    main()
