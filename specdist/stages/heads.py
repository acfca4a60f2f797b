"""Owns what the stages know of draft heads: how they are read, the tree they are served with, what is said of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from specdist import provenance
from specdist.drafters.heads import DraftHeads, HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.heads_file import draft_tree, heads_file, load_heads
from specdist.evaluation.acceptance import EvalSet, HeadsScorer, TreeScorer
from specdist.evaluation.heads_report import heads_report
from specdist.export.medusa import as_exported
from specdist.schema_heads import HeadsReport
from specdist.stages.assess import Loader, ServedTree
from specdist.stages.changed_target import changed_target
from specdist.stages.run import Run
from specdist.training.checkpoints import checkpoint_step
from specdist.tree import DraftTree


def read_heads(path: Path, run: Run) -> DraftHeads:
    """Heads of one of the run's checkpoints, or of its export."""
    return load_heads(heads_file(path), run.target.identity.vocab_size)


def heads_loader(run: Run, eval_ends: Callable[[], TargetEnds]) -> Loader:
    """How heads are read from disk, and the tree that lies with their export."""

    def scorer(path: Path) -> HeadsScorer:
        return HeadsScorer(HeadsOnTarget(read_heads(path, run), eval_ends()))

    def drafter(path: Path, target: PreTrainedModel, tree: DraftTree | None = None) -> HeadsDrafter:
        return HeadsDrafter(HeadsOnTarget(read_heads(path, run), TargetEnds.of(target)), tree)

    def served_tree(export: Path, target: PreTrainedModel) -> ServedTree | None:
        tree = draft_tree(export, run.config.model.medusa_num_heads)
        return None if tree is None else ServedTree(TreeScorer(scorer(export), tree), drafter(export, target, tree))

    changed = partial(changed_target, run) if run.config.model.changes_target else None
    return Loader(scorer, drafter, served_tree, changed)


def measured_heads(run: Run, checkpoint: Path, texts: EvalSet) -> HeadsReport:
    """What is said of the heads of a checkpoint alone, from greedy texts; measured once, by all processes, then read.

    They are taken as they will be exported, on the target in the dtype that serves; where training changed that, on the
    changed one, whose own answers take the place of `texts`.
    """
    path = run.directory / "evaluations" / f"heads-{checkpoint_step(checkpoint)}.json"
    if not path.exists():
        if run.config.model.changes_target:
            changed = changed_target(run, checkpoint)
            run, texts = changed.run, changed.greedy_texts()[0]
        model = run.target_model(run.config.target.target_dtype)
        ends = TargetEnds.of(model)
        served = as_exported(read_heads(checkpoint, run), ends.projection.weight, model.dtype)
        report = heads_report(HeadsScorer(HeadsOnTarget(served, ends)), texts, model)
        if run.is_main:
            provenance.write_json(path, report.to_json())
        run.state.wait_for_everyone()
    return HeadsReport.from_json(provenance.read_json(path), str(path))
