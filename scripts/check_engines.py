"""Holds the engines on vLLM against the one on transformers: the same prompts, greedily, with the best tokens.

Owns two checks of each engine: every row arrives, also where one of two servers is killed half-way; and its tokens are
those that transformers writes, but where the target's own two best tokens are a near-tie. Runs in the environment of
specdist (check_engines.sh). Servers, and the engine in process, run in vLLM's, one after another.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scripts.check_vllm import exit_status, run_engine
from scripts.vllm_comparison import NEAR_TIE_LOGIT_GAP, Difference, first_difference
from scripts.vllm_server import halves_of_cores, serve
from specdist import provenance
from specdist.dataset.prompts import PromptSet
from specdist.dataset.render import Renderer
from specdist.demo import demo_target
from specdist.errors import ArtifactError
from specdist.generation.endpoint import TokenizerProbe
from specdist.generation.engine import Engine, Request
from specdist.generation.hf import TransformersEngine
from specdist.generation.server import ServerEngine
from specdist.schema import ChatFormat, SamplingSpec
from specdist.target import Target, open_target

DTYPE = "float32"  # of bfloat16's near-ties there would be many
MAX_IN_FLIGHT = 16
NUM_TOP_LOGPROBS = 4
BEST_TOKENS = 20  # of the target, among which another engine's token is looked for
MAX_LOGPROB_DIFFERENCE = 0.01  # far above what fp32 kernels differ by, far below what another temperature would change

Answers = dict[str, dict[str, Any]]  # by the request's key, in plain values


@dataclass(frozen=True)
class Written:
    """What an engine wrote, and in how many seconds without its start."""

    engine: str
    answers: Answers
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """One engine beside the one on transformers."""

    engine: str
    num_rows: int
    num_arrived: int
    num_identical: int
    near_ties: list[Difference]
    different: list[Difference]
    max_logprob_difference: float  # over equal tokens at positions before the first difference of their row
    seconds: float

    @property
    def problems(self) -> list[str]:
        found = []
        if self.num_arrived != self.num_rows:
            found.append(f"{self.num_arrived} answers to {self.num_rows} requests")
        if self.different:
            found.append(f"{len(self.different)} rows leave the target's own tokens, and not at a near-tie")
        if self.max_logprob_difference > MAX_LOGPROB_DIFFERENCE:
            found.append(f"log-probabilities differ by up to {self.max_logprob_difference:.2g}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


# Engines


def collect(
    engine: Engine, requests: Sequence[Request], on_answer: Callable[[int], None] = lambda num: None
) -> Written:
    """All answers; `on_answer` is told how many have arrived. Raises ArtifactError where a row arrives twice."""
    rest, answers, began = iter(requests), {}, time.monotonic()
    for answer in engine.answers(lambda: next(rest, None)):
        if answer.request.key in answers:
            raise ArtifactError(f"row {answer.request.key} arrived twice")
        answers[answer.request.key] = asdict(answer)
        on_answer(len(answers))
    return Written(engine.name, answers, time.monotonic() - began)


def context_length(requests: Sequence[Request]) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests)


def run_in_process(python: str, target: Target, requests: Sequence[Request]) -> Written:
    """The engine in process, with specdist's package in reach of vLLM's interpreter."""
    engine = {
        "dtype": DTYPE,
        "eos_token_ids": target.identity.eos_token_ids,
        "max_in_flight": MAX_IN_FLIGHT,
        "context_length": context_length(requests),
        "num_top_logprobs": NUM_TOP_LOGPROBS,
        "enforce_eager": True,
    }
    question = {"target": str(target.path.absolute()), "engine": engine, "requests": [asdict(r) for r in requests]}
    # As it is used: in a process of vLLM's, with threads bound to cores. Free ones take ten times as long where they
    # share the cores with something else.
    usual = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    return Written(**run_engine(question, "engine_in_process.py", python, **usual))


def run_servers(python: str, target: Target, requests: Sequence[Request], probe: TokenizerProbe) -> Written:
    """Two servers, of which the second is killed when half of the rows have arrived."""
    settings: dict[str, Any] = {"dtype": DTYPE, "max_num_seqs": MAX_IN_FLIGHT}
    settings["context_length"] = context_length(requests)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = [
            stack.enter_context(serve(python, target.path, **settings, cores=cores, log=Path(name) / f"{i}.log"))
            for i, cores in enumerate(halves_of_cores())
        ]
        for server in servers:
            server.wait()
        engine = ServerEngine(
            [server.url for server in servers],
            model=None,
            target_names=[str(target.path.absolute())],
            probes=[probe],
            eos_token_ids=target.identity.eos_token_ids,
            max_in_flight=MAX_IN_FLIGHT,
            num_top_logprobs=NUM_TOP_LOGPROBS,
        )
        at_start = [server.num_completions() for server in servers]

        def kill_second(num_arrived: int) -> None:
            if num_arrived == len(requests) // 2:
                servers[1].kill()
                print(
                    f"       {num_arrived} of {len(requests)} rows have arrived, the second server is killed",
                    flush=True,
                )

        written = collect(engine, requests, kill_second)
        rows = [server.num_completions() - before for server, before in zip(servers, at_start, strict=True)]
        print(f"       answers by the servers' logs: {' + '.join(map(str, rows))}", flush=True)
        return written


# Comparison


def compare(other: Written, plain: Answers, best: Callable[[str], list[dict[str, float]]]) -> Outcome:
    """Judge what an engine wrote. `best`: the target's own log-probabilities over the plain answer to a request.

    They have the ids as text, at each position of the answer, its own token among them.
    """
    differences, deviations = [], [0.0]
    for key, theirs in other.answers.items():
        ours = plain[key]
        end = len(ours["completion_ids"])
        if ours["completion_ids"] != theirs["completion_ids"]:
            row = {"token_ids": ours["completion_ids"], "best": best(key)}
            difference = first_difference(key, row, {"token_ids": theirs["completion_ids"]})
            assert difference is not None
            differences.append(difference)
            end = difference.position
        deviations += _deviations(ours["top"], theirs["top"], end)
    near = [d for d in differences if d.logit_gap is not None and d.logit_gap < NEAR_TIE_LOGIT_GAP[DTYPE]]
    return Outcome(
        engine=other.engine,
        num_rows=len(plain),
        num_arrived=len(other.answers),
        num_identical=len(other.answers) - len(differences),
        near_ties=near,
        different=[d for d in differences if d not in near],
        max_logprob_difference=max(deviations),
        seconds=other.seconds,
    )


def _deviations(ours: dict[str, Any], theirs: dict[str, Any], end: int) -> list[float]:
    """Of the log-probabilities of tokens that both have among the best, at each position before `end`."""
    steps = [[dict(zip(top["ids"][i], top["logprobs"][i], strict=True)) for top in (ours, theirs)] for i in range(end)]
    return [abs(a[token] - b[token]) for a, b in steps for token in a.keys() & b.keys()]


def show(outcome: Outcome) -> str:
    """An outcome in a few lines."""
    lines = [
        f"{outcome.engine}: {outcome.num_arrived} of {outcome.num_rows} rows in {outcome.seconds:.0f} s, "
        f"{outcome.num_identical} with the tokens of transformers, {len(outcome.near_ties)} parted at a near-tie, "
        f"{len(outcome.different)} different; log-probabilities within {outcome.max_logprob_difference:.1e}"
    ]
    for kind, found in (("near-tie", outcome.near_ties), ("different", outcome.different)):
        for d in found:
            gap = f"over that of the {BEST_TOKENS} best" if d.logit_gap is None else f"{d.logit_gap:.5f}"
            lines.append(f"  {kind}: prompt {d.prompt_id}, token {d.position}, logit gap {gap}")
    return "\n".join(lines)


# The command


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the program."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_engines.sh",
        description="Compare what the engines on vLLM write with what the one on transformers does; kill a server.",
        epilog="Exit status 1: a row is missing, tokens differ (not at a near-tie), or log-probabilities do.",
    )
    add = parser.add_argument
    add("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    add("--target", type=Path, help="directory of the target model (default: the demo's)")
    add("--prompts", type=Path, default=Path("data/prompts/eval"), help="a prompt set (default: %(default)s)")
    add("--num-prompts", type=int, default=40, metavar="N", help="how many of them (default: %(default)s)")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of each answer (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/engine_check.json"), help="the result (default: %(default)s)")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> bool:
    """Run the engines, show the outcomes, write the result; whether every engine passed."""
    target = open_target(str(args.target or demo_target()))
    renderer = Renderer(target.tokenizer, ChatFormat())
    sampling = SamplingSpec(max_new_tokens=args.max_new_tokens)
    prompts = list(islice(PromptSet.open(args.prompts), args.num_prompts))
    requests = [Request(p.id, renderer.encode(p.messages), sampling, seed=0) for p in prompts]
    print(f"{target.path}, {DTYPE}: {len(requests)} prompts, up to {args.max_new_tokens} new tokens", flush=True)

    model = target.load_model(torch.float32)
    transformers = TransformersEngine(
        model,
        eos_token_ids=target.identity.eos_token_ids,
        pad_token_id=target.identity.eos_token_ids[0],
        max_batch_rows=MAX_IN_FLIGHT,
        max_batch_tokens=MAX_IN_FLIGHT * context_length(requests),
        num_top_logprobs=NUM_TOP_LOGPROBS,
    )
    plain = collect(transformers, requests)
    print(f"{plain.engine}: {len(plain.answers)} rows in {plain.seconds:.0f} s", flush=True)

    def best(key: str) -> list[dict[str, float]]:
        answer = plain.answers[key]
        prompt, ids = answer["request"]["prompt_ids"], answer["completion_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]  # [n, V]
        top = logits.log_softmax(-1).topk(BEST_TOKENS)
        return [
            dict(zip(map(str, i), v, strict=True))
            for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]

    outcomes = []
    probe = TokenizerProbe(prompts[0].messages, requests[0].prompt_ids)
    for run in (
        lambda: run_in_process(args.vllm_python, target, requests),
        lambda: run_servers(args.vllm_python, target, requests, probe),
    ):
        outcomes.append(compare(run(), plain.answers, best))
        print(show(outcomes[-1]), flush=True)
    passed = not any(outcome.problems for outcome in outcomes)
    settings = {"dtype": DTYPE, "num_prompts": len(requests), "max_new_tokens": args.max_new_tokens}
    result = {"settings": settings, "engines": [outcome.to_json() for outcome in outcomes], "passed": passed}
    provenance.write_json(args.output, result)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.engine}: {problem}", file=sys.stderr)
    print(f"{'passed' if passed else 'failed'}; the result is {args.output}")
    return passed


def main() -> int:
    """Exit status of the command."""
    return exit_status(lambda: check(parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
