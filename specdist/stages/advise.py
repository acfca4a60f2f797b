"""Owns what is said before training about a draft and its target: the fit on this machine, and what became of it.

The same fit table stands in a draft model's dry run.
"""

import logging
from pathlib import Path

from accelerate import PartialState

from specdist.config import TargetArguments
from specdist.dataset.manifest import read_manifest, read_rows
from specdist.drafter_config import DraftArguments
from specdist.drafters.causal_lm import DraftModelDrafter, load_for_drafting
from specdist.errors import ArtifactError
from specdist.evaluation.fit import Fit, measure_fit
from specdist.evaluation.fit_table import comparison_lines
from specdist.evaluation.report import read_report
from specdist.evaluation.speed import measure_speed
from specdist.schema import DistillRow, EvalReport, SamplingSpec
from specdist.stages.process import keep_freed_memory, use_all_cores
from specdist.stages.run import dtype_of
from specdist.target import Target

logger = logging.getLogger(__name__)

_TIMED_PROMPTS, _REPEATS = 8, 2


def draft_fit(target: Target, arguments: TargetArguments, draft: DraftArguments) -> Fit:
    """Measure the draft that a recipe would train beside `target`, on the recipe's device and cores."""
    use_all_cores()
    keep_freed_memory()
    device = PartialState().device
    return measure_fit(target, draft, dtype_of(arguments.target_dtype), device, arguments.target_device_map)


def _timed_rows(data_dir: Path, report: EvalReport) -> tuple[SamplingSpec, list[DistillRow]]:
    """The target's greedy answers to some prompts of the report's evaluation, spread evenly over it.

    Raises ArtifactError where `data_dir` has no such dataset.
    """
    for path in sorted(data_dir.glob("*/manifest.json")):
        inputs = read_manifest(path.parent).inputs
        sampling = inputs.samplings[0]
        if inputs.prompts_sha256 != report.eval_prompts_sha256 or not sampling.is_greedy:
            continue
        rows = read_rows(path.parent)[1]
        ids = sorted({row.prompt_id for row in rows})
        chosen = set(ids[:: max(1, len(ids) // _TIMED_PROMPTS)][:_TIMED_PROMPTS])
        return sampling, [row for row in rows if row.prompt_id in chosen]
    raise ArtifactError(
        f"{data_dir}: no greedy answers to the report's evaluation prompts; name the run's own data with --config"
    )


def compare_with_run(
    fit: Fit, target: Target, arguments: TargetArguments, directory: Path, data_dir: Path
) -> list[str]:
    """Time the export of a finished run at every draft length that its report replayed, beside what `fit` predicts.

    Raises ArtifactError where `directory` holds no report of a draft model for this target.
    """
    report = read_report(directory)
    if report.drafter_kind != "draft_model" or report.target.weights_sha256 != target.identity.weights_sha256:
        raise ArtifactError(
            f"{directory}: holds a {report.drafter_kind} for {report.target.model_id}; expected a draft model for "
            f"{target.identity.model_id}"
        )
    sampling, rows = _timed_rows(data_dir, report)
    device = PartialState().device
    model = target.load_model(dtype_of(arguments.target_dtype), device, arguments.target_device_map)
    speed = measure_speed(
        model,
        DraftModelDrafter(*load_for_drafting(directory / "export", target, model.dtype, device)),
        rows,
        sampling,
        target.identity.eos_token_ids,
        lengths=sorted({r.num_speculative_tokens for r in report.acceptance}),
        repeats=_REPEATS,
    )
    return comparison_lines(fit, report, speed, {row.prompt_id for row in rows})
