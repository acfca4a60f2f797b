"""Trains one draft model in many ways on equal data, and puts what each way gains in a table.

    python scripts/ablation.py run [--only NAME …] [--key value …]     what is finished is not done again
    python scripts/ablation.py table [--write README.md]               in place of what is between the file's markers

Runs are those of recipes/configs/smollm2-135m/ablation/variants.yaml, on top of base.yaml; keys on the command line go
to every run, for example --train_prompts and --eval_prompts. Each is a run of recipes/distill_draft.py.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from specdist import metrics
from specdist.evaluation.report import read_report
from specdist.provenance import write_text
from specdist.schema import AcceptanceResult, EvalReport

CONFIGS = Path("recipes/configs/smollm2-135m/ablation")
RUNS = Path("runs/ablation")
SETTINGS = {"greedy": "greedy", "t0.7": "temperature 0.7"}
GAMMA = 5
NOT_KEYS = ("about", "against")
JUDGED = (0, 3, 4)  # exit statuses of a recipe that measured its drafter


def variants() -> dict[str, dict[str, dict[str, Any]]]:
    """Tables by heading, in each the runs by name."""
    return yaml.safe_load((CONFIGS / "variants.yaml").read_text(encoding="utf-8"))


def command(name: str, changes: dict[str, Any], common: list[str]) -> list[str]:
    """The recipe's command line for one run."""
    keys = [f"--output_dir={RUNS / name}", *common]
    for key, value in changes.items():
        if key not in NOT_KEYS:
            keys += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    # Not by accelerate launch, which makes every verdict but a promotion a status of 1
    return [sys.executable, "recipes/distill_draft.py", "--config", str(CONFIGS / "base.yaml"), *keys]


def run(only: list[str], common: list[str]) -> int:
    """Train and judge every run, or those named, one after the other. 2 where one could not be."""
    chosen = {name: changes for table in variants().values() for name, changes in table.items()}
    if unknown := set(only) - chosen.keys():
        sys.exit(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    failed = []
    for number, name in enumerate(only or chosen, start=1):
        print(f"[{number}/{len(only or chosen)}] {name}", flush=True)
        if subprocess.run(command(name, chosen[name], common), check=False).returncode not in JUDGED:
            failed.append(name)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 2 if failed else 0


def result(report: EvalReport, setting: str) -> AcceptanceResult:
    """The report's acceptance at γ = GAMMA in one setting."""
    return next(r for r in report.acceptance if r.setting == setting and r.num_speculative_tokens == GAMMA)


def gain(report: EvalReport, other: EvalReport, setting: str) -> tuple[float, list[float]]:
    """Relative gain of τ − 1 over another run's, and its 95 % interval over prompts."""
    ours, theirs = (result(r, setting).prompts for r in (report, other))
    value = (metrics.pooled_length(ours) - 1) / (metrics.pooled_length(theirs) - 1) - 1
    return value, metrics.interval(metrics.bootstrap_gain_ratios(ours, theirs) - 1)


def cells(name: str, changes: dict[str, Any], reports: dict[str, EvalReport], setting: str) -> list[str]:
    """τ with its interval, and the gain."""
    summary = result(reports[name], setting).summary
    low, high = summary.mean_accepted_length_interval
    shown = [f"{summary.mean_accepted_length:.3f} ({low:.3f} to {high:.3f})"]
    if (other := changes.get("against")) not in reports:
        return [*shown, ""]
    value, (low, high) = gain(reports[name], reports[other], setting)
    return [*shown, f"{value:+.1%} ({low:+.1%} to {high:+.1%})"]


def tables() -> str:
    """Markdown of all runs that are finished."""
    parts, headings = [], variants()
    names = [name for members in headings.values() for name in members]
    reports = {name: read_report(RUNS / name) for name in names if (RUNS / name / "report.json").exists()}
    for heading, members in headings.items():
        finished = [name for name in members if name in reports]
        if not finished:
            continue
        titles = [t for label in SETTINGS.values() for t in (f"τ, {label} (95 %)", "gain of τ − 1")]
        lines = [f"| {heading} | compared with | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
        for name in finished:
            changes = members[name]
            row = [c for setting in SETTINGS for c in cells(name, changes, reports, setting)]
            lines.append(f"| {' | '.join([changes['about'], changes.get('against', ''), *row])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(path: Path, text: str) -> None:
    """Put `text` between the file's markers."""
    before, start, rest = path.read_text(encoding="utf-8").partition("<!-- ablation -->\n")
    _, end, after = rest.partition("<!-- /ablation -->")
    if not start or not end:
        sys.exit(f"{path}: has no <!-- ablation --> and <!-- /ablation --> lines")
    write_text(path, f"{before}{start}{text}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--only", nargs="+", default=[])
    commands.add_parser("table").add_argument("--write", type=Path)
    args, rest = parser.parse_known_args()
    if args.command == "run":
        return run(args.only, rest)
    text = tables()
    print(text)
    if args.write:
        write(args.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
