"""Opens champions of the registry in vLLM and holds what it does against what specdist measured on the same prompts.

Four checks: speculative greedy output is the target's own, drafts are accepted at all, vLLM's mean acceptance length is
ours, and on the same texts each position of a draft is accepted as often (vllm_comparison.py). Runs in vLLM's
environment (check_vllm.sh), where specdist is not installed: of specdist it imports only what needs no more than numpy.
Engines run one after another (vllm_engine.py).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from scripts.vllm_comparison import MAX_LENGTH_DIFFERENCE, NEAR_TIE_LOGIT_GAP, Drafter, Row, compare, table
from specdist import provenance
from specdist.demo import demo_target
from specdist.errors import ArtifactError, SpecdistError
from specdist.schema import DatasetManifest, EvalReport, SamplingSpec

ENGINE_ENVIRONMENT = {  # what the caller has set wins
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads bound to cores stall each other where something else runs too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


# What is checked, and on what


def champions(registry: Path) -> list[str]:
    """Names of the models that have a champion. Raises ArtifactError where there is none."""
    if names := sorted(path.parent.parent.name for path in registry.glob("*/aliases/champion")):
        return names
    raise ArtifactError(f"{registry}: no champion there; run scripts/quickstart.sh first, or give --registry")


def drafter_path(name: str, registry: Path) -> Path:
    """The champion link of model `name`, which is not resolved; else `name` as the directory of an export."""
    link = registry / name / "aliases" / "champion"
    if link.is_dir():
        return link
    if (Path(name) / "export.json").is_file():
        return Path(name)
    raise ArtifactError(f"drafter {name}: neither {link} nor {Path(name) / 'export.json'} exists")


def open_drafter(name: str, registry: Path, num_speculative_tokens: int | None) -> Drafter:
    """Check the files of an export and read its report, at the longest measured draft length up to the one given.

    Raises ArtifactError where a file is missing or altered or the report is not about this export.
    """
    path = drafter_path(name, registry)
    record = provenance.read_json(path / "export.json")
    for file, digest in record["files"].items():
        if not (path / file).is_file() or provenance.sha256_file(path / file) != digest:
            raise ArtifactError(f"{path / file}: missing or altered since the export; publish again")
    report = EvalReport.from_json(provenance.read_json(path / "report.json"), str(path / "report.json"))
    if report.drafter_sha256 != record["drafter_sha256"]:
        raise ArtifactError(f"{path / 'report.json'}: measured on another drafter; evaluate and publish again")
    wanted = num_speculative_tokens or report.num_speculative_tokens
    usable = [r for r in report.acceptance if r.setting == "greedy" and r.num_speculative_tokens <= wanted]
    if not usable:
        raise ArtifactError(f"{path / 'report.json'}: nothing measured at temperature 0, draft length up to {wanted}")
    longest = max(usable, key=lambda result: result.num_speculative_tokens)
    return Drafter(name, path, record["speculative_config"]["method"], report, longest)


def check_target(target: Path, drafters: Sequence[Drafter]) -> None:
    """Raise ArtifactError unless `target` holds the weights that every drafter was measured with."""
    found = provenance.sha256_json({p.name: provenance.sha256_file(p) for p in sorted(target.glob("*.safetensors"))})
    for drafter in drafters:
        wanted = drafter.report.target
        if found != wanted.weights_sha256:
            raise ArtifactError(f"{target}: not the target of {drafter.name}, {wanted.model_id}; give it by --target")


def find_dataset(dataset: Path | None, runs: Path, drafters: Sequence[Drafter]) -> tuple[Path, DatasetManifest]:
    """The given or newest dataset of greedy answers of the drafters' target to their evaluation prompts.

    Raises ArtifactError where there is none.
    """
    wanted = {(d.report.eval_prompts_sha256, d.report.target.weights_sha256) for d in drafters}
    files = [dataset / "manifest.json"] if dataset else list(runs.glob("*/data/*/manifest.json"))
    for file in sorted(files, key=lambda path: path.stat().st_mtime if path.exists() else 0.0, reverse=True):
        manifest = DatasetManifest.from_json(provenance.read_json(file), str(file))
        found = (manifest.inputs.prompts_sha256, manifest.inputs.target.weights_sha256)
        if wanted == {found} and any(sampling.is_greedy for sampling in manifest.inputs.samplings):
            return file.parent, manifest
    raise ArtifactError(
        f"{dataset or runs / '*/data/*'}: no greedy answers of the target to the prompts that "
        f"{[d.name for d in drafters]} were evaluated on; name another directory by --dataset, "
        "and check drafters that were evaluated on different prompts one at a time"
    )


def read_rows(directory: Path, manifest: DatasetManifest, drafters: Sequence[Drafter], limit: int) -> list[Row]:
    """The first `limit` greedy rows that every report counts, in the order of their ids, which are hashes.

    Raises ArtifactError where a shard is not the manifest's or no row is counted.
    """
    rows: list[Row] = []
    for name, digest in manifest.shards.items():
        if not (directory / name).is_file() or provenance.sha256_file(directory / name) != digest:
            raise ArtifactError(f"{directory / name}: missing or altered; make the dataset again")
        rows += pq.read_table(directory / name).to_pylist()
    counted = set.intersection(*({p.prompt_id for p in d.acceptance.prompts} for d in drafters))
    greedy = next(sampling for sampling in manifest.inputs.samplings if sampling.is_greedy)
    greedy_rows = [row for row in rows if SamplingSpec(**row["sampling"]) == greedy]
    turns = Counter(row["prompt_id"] for row in greedy_rows)
    # The counters of a conversation of several turns are those of all its rows together
    usable = [row for row in greedy_rows if row["prompt_id"] in counted and turns[row["prompt_id"]] == 1]
    if not usable:
        raise ArtifactError(f"{directory}: no prompt of it is counted in the reports of all drafters; give --dataset")
    return sorted(usable, key=lambda row: row["id"])[:limit]


# Engines


def engine_request(
    target: Path, drafter: Drafter | None, rows: Sequence[Row], eos_token_ids: list[int], dtype: str
) -> dict[str, Any]:
    """What an engine is told, as plain values."""
    gamma = drafter.acceptance.num_speculative_tokens if drafter else 0
    max_new_tokens = rows[0]["sampling"]["max_new_tokens"]
    # Of the longest text the last block too: vLLM drafts nothing where its longest block would not fit any more
    needed = max(len(row["prompt_ids"]) for row in rows) + max_new_tokens + 2 * (gamma + 1)
    context_length = provenance.read_json(target / "config.json").get("max_position_embeddings", needed)
    return {
        "target": str(target.absolute()),
        "dtype": dtype,
        "max_model_len": min(needed, context_length),
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": eos_token_ids,
        "prompts": [row["prompt_ids"] for row in rows],
        "speculative_config": drafter
        and {"method": drafter.method, "model": str(drafter.path.absolute()), "num_speculative_tokens": gamma},
    }


def run_engine(
    request: dict[str, Any], script: str = "vllm_engine.py", python: str = sys.executable, **environment: str
) -> Any:
    """What a script beside this one answers to a request, in a fresh process of vLLM's environment.

    Raises ArtifactError, showing the end of vLLM's log, where that fails.
    """
    with tempfile.TemporaryDirectory() as name:
        log, question, answer = (Path(name) / part for part in ("log", "request.json", "answer.json"))
        provenance.write_json(question, request)
        command = [python, str(Path(__file__).with_name(script)), str(question), str(answer)]
        variables = {**ENGINE_ENVIRONMENT, **environment, **os.environ}
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=variables)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise ArtifactError(f"vLLM failed, exit status {done.returncode}; the end of its log:\n{tail}")
        return provenance.read_json(answer)


# The command


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the program."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_vllm.sh",
        description="Open drafters in vLLM; compare its greedy tokens and acceptance with the target and the report.",
        epilog="Exit status 1: tokens differ (not at a near-tie), nothing was accepted, or the mean acceptance length "
        f"is off by more than {MAX_LENGTH_DIFFERENCE:.0%}.",
    )
    add = parser.add_argument
    add("--drafter", action="append", metavar="NAME", help="model or export directory, repeatable (default: all)")
    add("--target", type=Path, help="directory of the target model (default: the demo's)")
    add("--registry", type=Path, default=Path("runs/registry"), help="registry of drafters (default: %(default)s)")
    add("--dataset", type=Path, help="the evaluation prompts' greedy answers (default: the newest beside the registry)")
    add("--num-prompts", type=_positive, default=24, metavar="N", help="how many of them (default: %(default)s)")
    add("--num-speculative-tokens", type=_positive, metavar="N", help="draft length at most (default: the report's)")
    add("--dtype", choices=sorted(NEAR_TIE_LOGIT_GAP), default="float32", help="vLLM's (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/vllm_check.json"), help="the result (default: %(default)s)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected 1 or more")
    return value


def exit_status(check: Callable[[], bool]) -> int:
    """0 where the check passes, 1 where it does not or cannot be made, with the reason on stderr."""
    try:
        return 0 if check() else 1
    except SpecdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check(args: argparse.Namespace) -> bool:
    """Run the engines, print the table, write the result; whether every drafter passed."""
    names = args.drafter or champions(args.registry)
    drafters = [open_drafter(name, args.registry, args.num_speculative_tokens) for name in names]
    target = args.target or demo_target()
    check_target(target, drafters)
    directory, manifest = find_dataset(args.dataset, args.registry.parent, drafters)
    rows = read_rows(directory, manifest, drafters, args.num_prompts)
    settings = {
        "vllm": version("vllm-cpu"),
        "dtype": args.dtype,
        "num_prompts": len(rows),
        "max_new_tokens": rows[0]["sampling"]["max_new_tokens"],
        "near_tie_logit_gap": NEAR_TIE_LOGIT_GAP[args.dtype],
        "max_length_difference": MAX_LENGTH_DIFFERENCE,
    }
    length = f"up to {settings['max_new_tokens']} new tokens"
    print(f"vLLM {settings['vllm']}, {args.dtype}: {len(rows)} prompts of {directory}, {length}", flush=True)
    answers = []
    for drafter in (None, *drafters):
        began = time.monotonic()
        answers.append(
            run_engine(engine_request(target, drafter, rows, manifest.inputs.target.eos_token_ids, args.dtype))
        )
        print(f"[{time.monotonic() - began:4.0f} s] {drafter.path if drafter else 'no speculation'}", flush=True)
    outcomes = [compare(d, rows, answers[0], other, args.dtype) for d, other in zip(drafters, answers[1:], strict=True)]
    passed = not any(outcome.problems for outcome in outcomes)
    result = {"settings": settings, "drafters": [outcome.to_json() for outcome in outcomes], "passed": passed}
    provenance.write_json(args.output, result)
    print(f"\n{table(outcomes)}\n\nvLLM also counts drafts past the end of a text: compare lengths rather than rates.")
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.drafter}: {problem}", file=sys.stderr)
    print(f"{'passed' if passed else 'failed'}; the result is {args.output}")
    return passed


def main() -> int:
    """Exit status of the command."""
    return exit_status(lambda: check(parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
