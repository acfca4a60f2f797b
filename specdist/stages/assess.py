"""Owns measuring a drafter: each checkpoint at the gate's setting, the export at every setting, certified and timed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist import provenance, tracking
from specdist.config import MAX_SPECULATIVE_TOKENS
from specdist.consistency import pairing_fault
from specdist.drafters.base import Drafter
from specdist.errors import ArtifactError
from specdist.evaluation.acceptance import EvalSet, Scorer, evaluate
from specdist.evaluation.certify import certify_greedy, certify_sampled
from specdist.evaluation.report import read_report, write_report
from specdist.evaluation.speed import measure_speed
from specdist.evaluation.step_costs import measure_step_costs, predict_speed
from specdist.evaluation.summary import drafted
from specdist.export.record import read_record
from specdist.in_place import fits_in_place
from specdist.schema import AcceptanceResult, CheckpointPoint, DatasetManifest, EvalReport
from specdist.schema_heads import HeadsReport
from specdist.schema_reload import Reload
from specdist.stages.changed_target import ChangedTarget
from specdist.stages.process import free_memory
from specdist.stages.reload import ReloadRequest, read_export, reload_export, reload_prompts
from specdist.stages.run import Run
from specdist.training.checkpoints import COMPLETE_FILE, best_step, checkpoint_path, checkpoint_step

logger = logging.getLogger(__name__)

PRIMARY_SETTING = "greedy"


@dataclass(frozen=True)
class ServedTree:
    """The draft tree that lies with exported heads, in use: for replay, and for decoding."""

    scorer: Scorer
    drafter: Drafter


@dataclass(frozen=True)
class Loader:
    """How one kind of drafter is read from disk, from a checkpoint or an export: for replay, and for decoding.

    `tree`: the tree that lies with an export; None where none does.
    `changed_target`: the target that comes with it, where training changed that; None for drafters that leave it.
    """

    scorer: Callable[[Path], Scorer]
    drafter: Callable[[Path, PreTrainedModel], Drafter]
    tree: Callable[[Path, PreTrainedModel], ServedTree | None] = lambda path, target: None
    changed_target: Callable[[Path], ChangedTarget] | None = None


def _evaluation_file(run: Run, step: int) -> Path:
    return checkpoint_path(run.directory / "evaluations", step).with_suffix(".json")


def _measured_steps(run: Run) -> list[int]:
    return sorted(int(file.stem.split("-")[1]) for file in (run.directory / "evaluations").glob("checkpoint-*.json"))


def _read_evaluation(run: Run, step: int) -> AcceptanceResult:
    path = _evaluation_file(run, step)
    return AcceptanceResult.from_json(provenance.read_json(path), str(path))


def forget_after(run: Run, step: int) -> None:
    """Delete the measurements of checkpoints after `step`: training goes on from there and makes them anew."""
    for later in _measured_steps(run):
        if later > step:
            _evaluation_file(run, later).unlink()


def lower_bounds(run: Run) -> dict[int, float]:
    """By step, the lower 95 % bound of τ of each checkpoint that was measured; the untrained drafter is not one."""
    results = {step: _read_evaluation(run, step) for step in _measured_steps(run) if step > 0}
    return {step: result.summary.mean_accepted_length_interval[0] for step, result in results.items()}


def primary_acceptance(run: Run, scorer: Callable[[], Scorer], eval_sets: list[EvalSet], step: int) -> AcceptanceResult:
    """Acceptance of one checkpoint at the gate's setting and draft length; measured once, then read."""
    if not (path := _evaluation_file(run, step)).exists():
        gamma = run.config.evaluation.num_speculative_tokens
        results = evaluate(scorer(), eval_sets[0], [gamma], f"acceptance of step {step}")
        if run.is_main:
            provenance.write_json(path, results[0].to_json())
        run.state.wait_for_everyone()
    return _read_evaluation(run, step)


def champion_report(run: Run) -> EvalReport | None:
    """The report of the champion that serves now, or None."""
    champion = run.registry.champion()
    return read_report(champion.path) if champion else None


def checkpoint_metrics(run: Run, loader: Loader, eval_sets: list[EvalSet]) -> Callable[[Path], dict[str, float]]:
    """A function for training callbacks: measures a checkpoint from disk and gives the metrics of the run."""
    champion = champion_report(run)
    reference = champion.primary if champion and champion.target == run.target.identity else None

    def measure(checkpoint: Path) -> dict[str, float]:
        step, texts = checkpoint_step(checkpoint), eval_sets
        if loader.changed_target and not _evaluation_file(run, step).exists():
            texts = loader.changed_target(checkpoint).greedy_texts()
        result = primary_acceptance(run, lambda: loader.scorer(checkpoint), texts, step)
        untrained = primary_acceptance(run, _must_exist, eval_sets, 0)
        summary, tau = result.summary, result.summary.mean_accepted_length
        low, high = summary.mean_accepted_length_interval
        values = {
            tracking.MEAN_ACCEPTED_LENGTH: tau,
            tracking.MEAN_ACCEPTED_LENGTH_LOW: low,
            tracking.MEAN_ACCEPTED_LENGTH_HIGH: high,
            tracking.ACCEPTANCE_RATE: summary.acceptance_rate,
            tracking.GAIN_OVER_UNTRAINED: tau / untrained.summary.mean_accepted_length - 1.0,
        }
        if reference is not None and not pairing_fault(result, reference):
            values[tracking.GAIN_OVER_CHAMPION] = tau / reference.summary.mean_accepted_length - 1.0
        return values

    return measure


def _must_exist() -> Scorer:
    raise ArtifactError("the untrained drafter has not been measured; delete the run's directory and start anew")


def best_checkpoint(run: Run) -> tuple[Path, list[CheckpointPoint]]:
    """The checkpoint with the best lower confidence bound of τ, and the curve of all (step 0 is untrained).

    The curve holds deleted checkpoints too: their measurements stay. Raises ArtifactError where the best is not there.
    """
    points = [CheckpointPoint(step, _read_evaluation(run, step).summary) for step in _measured_steps(run)]
    for point in points:
        logger.info("step %d: mean accepted length %.3f", point.step, point.summary.mean_accepted_length)
    if not (bounds := lower_bounds(run)):
        raise ArtifactError(f"{run.checkpoints}: no complete checkpoint was measured; training wrote none")
    best = checkpoint_path(run.checkpoints, best_step(bounds))
    if not (best / COMPLETE_FILE).exists():
        raise ArtifactError(
            f"{best}: measured best of {len(bounds)} checkpoints, but it was removed; delete {run.checkpoints} to "
            "train again, or choose another --output_dir"
        )
    return best, points


def _certified(run: Run, loader: Loader, scorer: Scorer, eval_sets: list[EvalSet], report: EvalReport) -> EvalReport:
    settings = run.config.evaluation
    model = run.target_model(run.config.target.eval_dtype)
    drafter = loader.drafter(run.export, model)
    gamma, eos = settings.num_speculative_tokens, run.target.identity.eos_token_ids
    sizes = (settings.certify_prompts, settings.certify_sampled_prompts)
    subsets = [s.truncated(n, settings.certify_max_new_tokens) for s, n in zip(eval_sets, sizes, strict=True)]
    greedy, fidelity = certify_greedy(model, drafter, scorer, subsets[0], gamma, eos)
    certifications = [greedy, certify_sampled(model, drafter, scorer, subsets[1], gamma, eos)]
    if tree := loader.tree(run.export, model):
        levels = tree.scorer.max_speculative_tokens
        certification, fidelity_of_tree = certify_greedy(model, tree.drafter, tree.scorer, subsets[0], levels, eos)
        certifications.append(certification)
        fidelity += fidelity_of_tree
    invalid = [
        f"replay and the real decoder disagree at {c.setting}, {drafted(c)}: {c.replay_mean_accepted_length:.3f} and "
        f"{c.decoder_mean_accepted_length:.3f}"
        for c in certifications
        if not c.passed
    ]
    measured = read_export(model, drafter, reload_prompts(subsets[0]), eos, gamma)
    return replace(
        report,
        certifications=certifications,
        fidelity=fidelity,
        invalid_reasons=invalid,
        num_target_parameters=model.num_parameters(),
        reload=Reload(measured),
    )


def _reloaded(run: Run, eval_set: EvalSet, report: EvalReport) -> EvalReport:
    """The report with what a fresh process reads of the export, beside what this one did."""
    assert report.reload is not None
    free_memory()  # the fresh process loads the target too, on the same device
    evaluation, target = run.config.evaluation, run.config.target
    request = ReloadRequest(
        export=str(run.export.absolute()),
        target=str(run.target.path.absolute()),
        dtype=target.eval_dtype,
        device=str(run.device),
        device_map=target.target_device_map,
        num_threads=torch.get_num_threads(),
        num_speculative_tokens=evaluation.num_speculative_tokens,
        prompts=reload_prompts(eval_set.truncated(evaluation.certify_prompts, evaluation.certify_max_new_tokens)),
    )
    return replace(report, reload=reload_export(report.reload.measured, request))


def _timed(run: Run, loader: Loader, eval_set: EvalSet, report: EvalReport) -> EvalReport:
    settings = run.config.evaluation
    if settings.speed_prompts == 0:
        return report
    model = run.target_model(run.config.target.target_dtype)
    subset = eval_set.truncated(settings.speed_prompts, eval_set.sampling.max_new_tokens)
    tree = loader.tree(run.export, model)
    drafter, trees = loader.drafter(run.export, model), [tree.drafter] if tree else []
    rows, lengths = [text.row for text in subset.texts], sorted({*settings.speed_lengths, report.served_length})
    speeds = [
        measure_speed(
            model,
            drafter,
            rows,
            subset.sampling,
            run.target.identity.eos_token_ids,
            lengths=lengths,
            repeats=settings.speed_repeats,
            trees=trees,
            batch_size=size,
        )
        for size in _batch_sizes(model, settings.speed_batch_sizes)
    ]
    known = report.heads.verify_costs if report.heads and report.heads.dtype == speeds[0].dtype else []
    costs = measure_step_costs(model, drafter, rows, lengths=lengths, trees=trees, verify=known)
    first, *others = (predict_speed(speed, costs) for speed in speeds)
    return replace(report, speed=first, batch_speeds=others, costs=costs)


def _batch_sizes(model: PreTrainedModel, asked: Sequence[int]) -> list[int]:
    """The batch sizes that are timed: those asked for, or 1 alone where the model decodes prompt by prompt."""
    sizes = sorted(set(asked))
    if sizes == [1] or fits_in_place(model):
        return sizes
    logger.warning(
        "speed_batch_sizes %s: the cache of %s cannot be written in place, so it decodes one prompt after the other; "
        "timed at batch size 1 alone",
        sizes,
        type(model).__name__,
    )
    return [1]


def assess_export(
    run: Run,
    loader: Loader,
    eval_sets: list[EvalSet],
    points: list[CheckpointPoint],
    training_data: DatasetManifest,
    heads: HeadsReport | None = None,
) -> EvalReport:
    """Measure the export as it lies on disk, and write `report.json` and `report.html`; measured once, then read.

    `heads`: what was measured of draft heads alone (`measured_heads`), which goes into the report.
    """
    record = read_record(run.export)
    if (run.directory / "report.json").exists():
        report = read_report(run.directory)
        if report.drafter_sha256 == record.drafter_sha256 and report.reload and report.reload.fresh:
            return report
    quality = None
    if loader.changed_target:
        changed = loader.changed_target(run.export)
        run, texts = changed.run, changed.texts()
        quality, eval_sets = changed.quality(eval_sets, texts), texts
    scorer = loader.scorer(run.export)
    lengths = range(1, MAX_SPECULATIVE_TOKENS + 1)
    acceptance = [r for s in eval_sets for r in evaluate(scorer, s, lengths, f"acceptance, {s.sampling.temperature:g}")]
    if run.is_main:
        report = EvalReport(
            drafter_kind=record.drafter_kind,
            drafter_sha256=record.drafter_sha256,
            num_parameters=record.num_parameters,
            checkpoint_step=record.checkpoint_step,
            lossless=record.lossless,
            target=record.target,
            eval_prompts_sha256=run.eval_prompts.sha256,
            num_training_rows=training_data.num_rows,
            num_training_tokens=training_data.num_supervised_tokens,
            primary_setting=PRIMARY_SETTING,
            num_speculative_tokens=run.config.evaluation.num_speculative_tokens,
            acceptance=acceptance,
            untrained=primary_acceptance(run, _must_exist, eval_sets, 0),
            checkpoints=points,
            certifications=[],
            fidelity=None,
            speed=None,
            dtype=run.config.target.eval_dtype,
            heads=heads,
            quality=quality,
        )
        report = _certified(run, loader, scorer, eval_sets, report)
        report = _timed(run, loader, eval_sets[0], report)
        report = _reloaded(run, eval_sets[0], report)
        write_report(report, run.directory)
    run.state.wait_for_everyone()
    return read_report(run.directory)
