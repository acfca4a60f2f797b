"""Prints what finished runs measured and how the gate judged them.

    python scripts/summary.py [RUN_DIRECTORY …]        default: the demo's two runs

Exit status 1 where a run is missing or was not promoted.
"""

import sys
from pathlib import Path

from specdist.errors import SpecdistError
from specdist.evaluation.summary import summary_table
from specdist.schema import EvalReport, GateDecision
from specdist.stages.release import read_release

DEMO_RUNS = ("runs/smollm2-135m/draft", "runs/smollm2-135m/medusa")


def _settings(report: EvalReport) -> str:
    primary = report.primary
    prompts = primary.summary.num_prompts if primary else 0
    where = (
        f"; timed on {report.speed.hardware}, {report.speed.dtype}, batch size {report.speed.batch_size}"
        if report.speed
        else ""
    )
    return (
        f"{report.primary_setting} decoding, γ={report.num_speculative_tokens}, "
        f"{prompts} held-out prompts, 95 % intervals over prompts{where}"
    )


def main() -> int:
    directories = [Path(argument) for argument in sys.argv[1:] or DEMO_RUNS]
    runs: dict[str, tuple[EvalReport, GateDecision | None]] = {}
    for directory in directories:
        try:
            runs[directory.name] = read_release(directory)
        except SpecdistError as error:
            print(f"{directory}: no result ({error})", file=sys.stderr)
    if runs:
        print()
        print(summary_table(runs))
        print(f"\n{_settings(next(iter(runs.values()))[0])}\n")
    for directory in directories:
        if directory.name in runs:
            print(f"report of {directory.name}: {(directory / 'report.html').absolute()}")
            decision = runs[directory.name][1]
            if decision is not None and decision.verdict != "promote":
                print(f"  {decision.verdict}: {decision.reason}")
    promoted = [name for name, (_, decision) in runs.items() if decision and decision.verdict == "promote"]
    return 0 if len(promoted) == len(directories) else 1


if __name__ == "__main__":
    sys.exit(main())
