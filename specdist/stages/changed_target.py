"""Owns evaluating a target that training changed (Medusa-2): its own texts, and its quality beside the original's.

A drafter is accepted by the changed target on what that target writes, so each checkpoint's target answers the
evaluation prompts anew. Its run is the original's, with another target in it.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from specdist.drafters.adapted_target import ADAPTER_DIRECTORY, adapted_target
from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.drafters.heads_file import heads_file, load_heads
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import EvalSet
from specdist.evaluation.quality import target_quality
from specdist.export.convert import find_export
from specdist.export.record import read_record
from specdist.schema_quality import TargetQuality
from specdist.stages.data import evaluation_data
from specdist.stages.run import Run
from specdist.target import Target


@dataclass(frozen=True)
class ChangedTarget:
    """The target as one checkpoint or the export changes it. `run`: the run in which it stands for the original."""

    run: Run

    def greedy_texts(self) -> list[EvalSet]:
        """Its greedy answers, with its states."""
        return evaluation_data(self.run, need_states=True, samplings=self.run.config.data.eval_samplings()[:1])

    def texts(self) -> list[EvalSet]:
        """Its greedy and its sampled answers, with its states."""
        return evaluation_data(self.run, need_states=True)

    def quality(self, original: list[EvalSet], own: list[EvalSet]) -> TargetQuality:
        """How it compares with the target that wrote `original`; `own` are its texts."""
        model = self.run.target_model(self.run.config.target.eval_dtype)
        return target_quality(original, own[0], model, self.run.target.identity.weights_sha256)


def changed_target(run: Run, path: Path) -> ChangedTarget:
    """The target of the run's checkpoint or export at `path`. Its texts take the place of those of another one."""
    home = run.directory / "texts"
    if run.is_main:
        for earlier in home.glob("*"):
            if earlier.name != path.name:
                shutil.rmtree(earlier)
    run.state.wait_for_everyone()
    data = replace(run.config.data, data_dir=str(home / path.name))
    target = adapted_target(run.target, path / ADAPTER_DIRECTORY)
    return ChangedTarget(replace(run, target=target, config=replace(run.config, data=data)))


def starting_heads(path: str, shape: HeadsShape, target: Target) -> DraftHeads:
    """The heads of a finished run, a registry's version or an export, to train on from.

    Raises ConfigError where they are of another shape, for another target, or changed it; ArtifactError where there are
    none.
    """
    export = find_export(Path(path))
    record = read_record(export)
    if record.target.weights_sha256 != target.identity.weights_sha256 or not record.lossless:
        raise ConfigError(
            f"init_heads {path}: heads for {record.target.model_id} (weights {record.target.weights_sha256[:12]}, "
            f"lossless: {record.lossless}), expected heads that leave {target.identity.model_id} (weights "
            f"{target.identity.weights_sha256[:12]}) as it is; train them on this target first"
        )
    heads = load_heads(heads_file(export), target.identity.vocab_size)
    if heads.shape != shape:
        raise ConfigError(f"init_heads {path}: {heads.shape}, but the configuration asks for {shape}; make them agree")
    return heads
