"""Holds serving against the registry: the same command opens whatever is champion when the engine starts.

Owns one walk for each drafter in a scratch copy of a registry: the champion, another version that is promoted, the
first one again after a rollback, and that one through the Hugging Face cache. Each time vLLM has to write the target's
own tokens; its counters tell which version it opened. The other version is the champion with some of its weights turned
around: it goes through no gate, which is why all of it happens in a copy. Runs in the environment of specdist
(check_serving.sh), the engines in vLLM's, one after another.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from scripts.check_vllm import (
    champions,
    check_target,
    engine_request,
    exit_status,
    find_dataset,
    open_drafter,
    read_rows,
    run_engine,
)
from scripts.vllm_comparison import NEAR_TIE_LOGIT_GAP, Drafter, Row, first_difference
from specdist import provenance
from specdist.demo import demo_target
from specdist.export_record import read_record, write_record
from specdist.registry.hub import HUB_DIRECTORY
from specdist.registry.store import Registry

DTYPE = "float32"
STAGES = (BEFORE, AFTER, BACK, CACHE) = ("champion", "after a promotion", "after a rollback", "through the cache")


@dataclass(frozen=True)
class Served:
    """What vLLM did in one stage; counters by prompt: verify steps and accepted tokens."""

    stage: str
    num_identical: int
    different: list[str]  # prompts whose tokens leave the target's own, and not at a near-tie
    counters: list[list[int]]
    tokens_per_second: float

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, accepted in self.counters)


@dataclass
class Walk:
    """One drafter through all stages."""

    drafter: str
    served: dict[str, Served]
    problems: list[str] = field(default_factory=list)


# Parts


def publish_other(registry: Registry, directory: Path) -> str:
    """Make another drafter champion: the present one with its vectors (norms, biases) reversed."""
    champion = registry.champion()
    assert champion is not None
    record = read_record(champion.path)
    for name in record.files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(champion.path / name, directory / name)
    for path in directory.glob("*.safetensors"):
        tensors = {key: t.flip(0).contiguous() if t.dim() == 1 else t for key, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    write_record(directory, record)
    return registry.publish(directory, files={}, tags={}, expected_champion=champion.number)


def tokens_per_second(answers: Sequence[Row]) -> float:
    """Of all answers but the first, which warms the engine up."""
    timed = answers[1:] or answers
    return sum(len(answer["token_ids"]) for answer in timed) / sum(answer["seconds"] for answer in timed)


def serve(stage: str, rows: Sequence[Row], plain: Sequence[Row], answers: Sequence[Row]) -> Served:
    """What the answers of one stage say beside those without a drafter."""
    pairs = zip(rows, plain, answers, strict=True)
    parted = [d for row, own, other in pairs if (d := first_difference(row["prompt_id"], own, other))]
    real = [d for d in parted if d.logit_gap is None or d.logit_gap >= NEAR_TIE_LOGIT_GAP[DTYPE]]
    return Served(
        stage=stage,
        num_identical=len(rows) - len(parted),
        different=[d.prompt_id for d in real],
        counters=[[answer["num_drafts"], sum(answer["accepted_at_position"])] for answer in answers],
        tokens_per_second=tokens_per_second(answers),
    )


def problems(served: dict[str, Served]) -> list[str]:
    """What is wrong with a walk, in words."""
    found = [
        f"{s.stage}: {len(s.different)} answers leave the target's own tokens" for s in served.values() if s.different
    ]
    if not served[BEFORE].num_accepted:
        found.append(f"{BEFORE}: no drafted token was accepted")
    if served[AFTER].counters == served[BEFORE].counters:
        found.append(f"{AFTER}: vLLM drafts as before, so it opened the version before, or both draft alike")
    for stage in (BACK, CACHE):
        if served[stage].counters != served[BEFORE].counters:
            found.append(f"{stage}: vLLM does not draft as the champion did before: another version was opened")
    return found


def walk(
    registry: Registry, drafter: Drafter, request: dict[str, Any], rows: list[Row], plain: list[Row], python: str
) -> Walk:
    """All stages of one drafter. The request is the same in all but the last, which names the model by the cache."""
    served = {}
    cached = {**request["speculative_config"], "model": registry.model_name, "revision": "champion"}
    for stage in STAGES:
        environment = {}
        with tempfile.TemporaryDirectory() as name:
            if stage == AFTER:
                publish_other(registry, Path(name) / "export")
            elif stage == BACK:
                registry.rollback()
            elif stage == CACHE:
                request = {**request, "speculative_config": cached}
                environment = {"HF_HUB_CACHE": str(registry.root / HUB_DIRECTORY)}
        served[stage] = serve(stage, rows, plain, run_engine(request, python=python, **environment))
        print(line(drafter.name, served[stage], len(rows)), flush=True)
    return Walk(drafter.name, served, problems(served))


def line(name: str, served: Served, num_prompts: int) -> str:
    """One stage in a line."""
    return (
        f"{name:24} {served.stage:18} {served.tokens_per_second:7.1f} tokens/s, {served.num_accepted:5} accepted, "
        f"the target's tokens on {served.num_identical} of {num_prompts}"
    )


# The command


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the program."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_serving.sh",
        description="vLLM opens the champion before and after a promotion and a rollback, with the same command.",
        epilog="Exit status 1: tokens leave the target's own, nothing is accepted, or another version was opened.",
    )
    add = parser.add_argument
    add("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    add("--drafter", action="append", metavar="NAME", help="model of the registry, repeatable (default: all)")
    add("--target", type=Path, help="directory of the target model (default: the demo's)")
    add("--registry", type=Path, default=Path("runs/registry"), help="copied first (default: %(default)s)")
    add("--dataset", type=Path, help="the evaluation prompts' greedy answers (default: the newest beside the registry)")
    add("--num-prompts", type=int, default=8, metavar="N", help="how many of them (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/serving_check.json"), help="the result (default: %(default)s)")
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> bool:
    """Walk with every drafter, write the result; whether all passed."""
    target = args.target or demo_target()
    with tempfile.TemporaryDirectory() as name:
        root = Path(shutil.copytree(args.registry, Path(name) / "registry", symlinks=True))
        drafters = [open_drafter(model, root, None) for model in args.drafter or champions(root)]
        check_target(target, drafters)
        directory, manifest = find_dataset(args.dataset, args.registry.parent, drafters)
        rows = read_rows(directory, manifest, drafters, args.num_prompts)
        eos = manifest.inputs.target.eos_token_ids
        plain = run_engine(engine_request(target, None, rows, eos, DTYPE), python=args.vllm_python)
        print(f"{'without a drafter':43} {tokens_per_second(plain):7.1f} tokens/s", flush=True)
        walks = []
        for drafter in drafters:
            registry = Registry(root, drafter.name)
            registry.reconcile()  # a registry from before the cache has none yet
            request = engine_request(target, drafter, rows, eos, DTYPE)
            walks.append(walk(registry, drafter, request, rows, plain, args.vllm_python))
    passed = not any(walk.problems for walk in walks)
    speeds = {"without": tokens_per_second(plain)}
    result = {"dtype": DTYPE, "speeds": speeds, "drafters": [asdict(walk) for walk in walks], "passed": passed}
    provenance.write_json(args.output, result)
    for found in walks:
        for problem in found.problems:
            print(f"{found.drafter}: {problem}", file=sys.stderr)
    print(f"{'passed' if passed else 'failed'}; the result is {args.output}")
    return passed


def main() -> int:
    """Exit status of the command."""
    return exit_status(lambda: check(parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
