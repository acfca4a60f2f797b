"""Trains one kind of drafter in many ways on equal data, and puts what each way gains in a table.

    python scripts/ablation.py run draft [--only NAME …] [--key value …]     what is finished is not done again
    python scripts/ablation.py table draft [--write README.md]               in place of what is between its markers

There are two studies: `draft` of draft models, `heads` of Medusa and Hydra heads. Runs are those of
recipes/configs/smollm2-135m/ablation/STUDY-variants.yaml, on top of STUDY.yaml; keys on the command line go to every
run, for example --train_prompts and --eval_prompts.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdist import metrics
from specdist.evaluation.report import read_report
from specdist.evaluation.summary import drafted
from specdist.provenance import write_text
from specdist.schema import AcceptanceResult, EvalReport
from specdist.schema_heads import DraftShape

CONFIGS = Path("recipes/configs/smollm2-135m/ablation")
RUNS = Path("runs/ablation")
SETTINGS = {"greedy": "greedy", "t0.7": "temperature 0.7"}
TREE_NODES = (16, 64)
NOT_KEYS = ("about", "against")
JUDGED = (0, 3, 4)  # exit statuses of a recipe that measured its drafter

Reports = dict[str, EvalReport]


@dataclass(frozen=True)
class Study:
    """One kind of drafter: what trains it, and what a table says of a run and the one it is compared with."""

    name: str
    recipe: str
    titles: list[str]
    cells: Callable[[EvalReport, EvalReport | None], list[str]]

    def variants(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Tables by heading, in each the runs by name."""
        return yaml.safe_load((CONFIGS / f"{self.name}-variants.yaml").read_text(encoding="utf-8"))

    def command(self, name: str, changes: dict[str, Any], common: list[str]) -> list[str]:
        """The recipe's command line for one run."""
        keys = [f"--output_dir={RUNS / name}", *common]
        for key, value in changes.items():
            if key not in NOT_KEYS:
                keys += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        # Not by accelerate launch, which makes every verdict but a promotion a status of 1
        return [sys.executable, self.recipe, "--config", str(CONFIGS / f"{self.name}.yaml"), *keys]


def run(study: Study, only: list[str], common: list[str]) -> int:
    """Train and judge every run, or those named, one after the other. 2 where one could not be."""
    chosen = {name: changes for table in study.variants().values() for name, changes in table.items()}
    if unknown := set(only) - chosen.keys():
        sys.exit(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    failed = []
    for number, name in enumerate(only or chosen, start=1):
        print(f"[{number}/{len(only or chosen)}] {name}", flush=True)
        if subprocess.run(study.command(name, chosen[name], common), check=False).returncode not in JUDGED:
            failed.append(name)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 2 if failed else 0


def result(report: EvalReport, setting: str) -> AcceptanceResult:
    """The report's acceptance in one setting, at the draft length that it is judged at."""
    return next(
        r
        for r in report.acceptance
        if r.setting == setting and r.num_speculative_tokens == report.num_speculative_tokens
    )


def with_interval(value: float, interval: list[float], form: str = ".3f") -> str:
    """The value, and its 95 % interval."""
    return f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def gain(ours: AcceptanceResult, theirs: AcceptanceResult) -> str:
    """Relative gain of τ − 1 over another run's, over prompts."""
    value = (metrics.pooled_length(ours.prompts) - 1) / (metrics.pooled_length(theirs.prompts) - 1) - 1
    ratios = metrics.bootstrap_gain_ratios(ours.prompts, theirs.prompts)
    return with_interval(value, metrics.interval(ratios - 1), "+.1%")


def lengths(report: EvalReport, other: EvalReport | None, setting: str) -> list[str]:
    """τ of the chain, and its gain over another run's."""
    ours = result(report, setting)
    shown = with_interval(ours.summary.mean_accepted_length, ours.summary.mean_accepted_length_interval)
    return [shown, "" if other is None else gain(ours, result(other, setting))]


def draft_cells(report: EvalReport, other: EvalReport | None) -> list[str]:
    """τ with its gain in every setting."""
    return [cell for setting in SETTINGS for cell in lengths(report, other, setting)]


def tree_cell(shapes: list[DraftShape], most: int) -> str:
    """τ of the largest tree of at most so many nodes."""
    tree = max((s for s in shapes if s.kind == "tree" and s.num_nodes <= most), key=lambda s: s.num_nodes)
    return with_interval(tree.mean_accepted_length, tree.mean_accepted_length_interval)


def speed_cells(report: EvalReport) -> list[str]:
    """Tokens per second of the target alone, of its best chain and of its tree, which took turns."""
    if report.speed is None:
        return ["", "", ""]
    chains = [point for point in report.speed.points if point.num_tree_nodes is None]
    trees = [point for point in report.speed.points if point.num_tree_nodes is not None]
    best = [max(points, key=lambda point: point.speedup) for points in (chains, trees) if points]
    shown = [f"{p.tokens_per_second:.1f}, {with_interval(p.speedup, p.speedup_interval, '.2f')} times" for p in best]
    drawn = [f"{words} ({drafted(point)})" for words, point in zip(shown, best, strict=True)]
    return [f"{report.speed.target_tokens_per_second:.1f}", *drawn, *[""] * (2 - len(drawn))]


def heads_cells(report: EvalReport, other: EvalReport | None) -> list[str]:
    """τ of the chain with its gain, of trees, each head's accuracy, and speed."""
    heads = report.heads
    if heads is None:
        sys.exit("a report of heads without their accuracies: delete its run and start it again")
    percent = [[f"{100 * one.accuracy[one.top.index(k)]:.1f}" for one in heads.accuracies] for k in (1, 5)]
    return [
        *lengths(report, other, "greedy"),
        *(tree_cell(heads.shapes, most) for most in TREE_NODES),
        *(" / ".join(values) for values in percent),
        *speed_cells(report),
    ]


STUDIES = {
    study.name: study
    for study in (
        Study(
            "draft",
            "recipes/distill_draft.py",
            [t for label in SETTINGS.values() for t in (f"τ, {label} (95 %)", "gain of τ − 1")],
            draft_cells,
        ),
        Study(
            "heads",
            "recipes/train_medusa.py",
            [
                "τ, chain (95 %)",
                "gain of τ − 1",
                *(f"τ, tree of {most} (95 %)" for most in TREE_NODES),
                "top-1 of the heads, %",
                "top-5, %",
                "target alone, tok/s",
                "chain, tok/s",
                "tree, tok/s",
            ],
            heads_cells,
        ),
    )
}


def tables(study: Study) -> str:
    """Markdown of all runs that are finished."""
    parts, headings = [], study.variants()
    names = [name for members in headings.values() for name in members]
    reports = {name: read_report(RUNS / name) for name in names if (RUNS / name / "report.json").exists()}
    for heading, members in headings.items():
        finished = [name for name in members if name in reports]
        if not finished:
            continue
        lines = [f"| {heading} | compared with | {' | '.join(study.titles)} |", "|---" * (2 + len(study.titles)) + "|"]
        for name in finished:
            about, against = members[name]["about"], members[name].get("against", "")
            lines.append(f"| {' | '.join([about, against, *study.cells(reports[name], reports.get(against))])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(path: Path, mark: str, text: str) -> None:
    """Put `text` between the file's markers."""
    before, start, rest = path.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    if not start or not end:
        sys.exit(f"{path}: has no <!-- {mark} --> and <!-- /{mark} --> lines")
    write_text(path, f"{before}{start}{text}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running, writing = commands.add_parser("run"), commands.add_parser("table")
    for command in (running, writing):
        command.add_argument("study", choices=STUDIES)
    running.add_argument("--only", nargs="+", default=[])
    writing.add_argument("--write", type=Path)
    args, rest = parser.parse_known_args()
    study = STUDIES[args.study]
    if args.command == "run":
        return run(study, args.only, rest)
    text = tables(study)
    print(text)
    if args.write:
        write(args.write, f"ablation {study.name}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
