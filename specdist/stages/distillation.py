"""Owns what a drafter is taught with: the objective, and where the target's distributions and states come from.

Either its stored best tokens, or its states: kept on disk beside the dataset, or computed at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Trainer, TrainingArguments

from specdist.dataset.features import TargetStates, target_states
from specdist.drafter_config import HeadsArguments
from specdist.drafters.adapter import add_target_adapters
from specdist.drafters.heads import DraftHeads
from specdist.drafters.vocabulary import shared_vocabulary_size
from specdist.errors import ConfigError
from specdist.losses import Objective
from specdist.stages.data import TrainingData, sole_writer
from specdist.stages.run import Run
from specdist.target import output_projection, shard_layers
from specdist.training.batches import DraftCollator
from specdist.training.heads import HeadsCollator, heads_trainer
from specdist.training.medusa2 import HeadsAndTarget, medusa2_trainer
from specdist.training.on_policy import OnPolicy
from specdist.training.target_output import TargetOutput


@dataclass(frozen=True)
class Distillation:
    """What `draft_trainer` needs beside the model and the trainer's arguments."""

    num_tokens: int
    objective: Objective
    collator: DraftCollator
    target: TargetOutput | None
    on_policy: OnPolicy | None


@dataclass(frozen=True)
class HeadsLesson:
    """What `heads_trainer` needs beside the heads and the trainer's arguments."""

    objective: Objective
    collator: HeadsCollator
    target: TargetOutput


def _objective(run: Run) -> Objective:
    asked = run.config.objective
    return Objective(
        asked.weights, asked.objective_temperature or run.config.data.eval_temperature, asked.jensen_shannon_beta
    )


def _pad_token_id(run: Run) -> int:
    pad: int | None = run.target.tokenizer.pad_token_id
    return run.target.identity.eos_token_ids[0] if pad is None else pad


def _states(run: Run, data: TrainingData, load_model: Callable[[], PreTrainedModel], max_length: int) -> TargetStates:
    dtype = run.config.target.target_dtype
    name = f"states-{max_length}-{dtype}-{data.manifest.rows_sha256[:12]}-{run.target.identity.weights_sha256[:12]}"
    with sole_writer(run, data.directory / name):
        return target_states(data.directory / name, data.examples, load_model)


def distillation(run: Run, data: TrainingData) -> Distillation:
    """The objective as configured, and the target's side of it; the target is loaded only where that is needed."""
    asked, training = run.config.objective, run.config.training
    objective, pad = _objective(run), _pad_token_id(run)
    full = asked.needs_target and asked.target_distribution == "full"
    load_model = cache(lambda: run.target_model(run.config.target.target_dtype))
    states = _states(run, data, load_model, training.max_length) if full and asked.cache_target_states else None
    target = None
    if full or asked.on_policy_share:
        model = load_model()
        live = asked.on_policy_share or states is None
        target = TargetOutput(output_projection(model, run.target.config), model if live else None)
    on_policy = None
    if asked.on_policy_share:
        eos = run.target.identity.eos_token_ids
        on_policy = OnPolicy(asked.on_policy_share, objective.temperature, eos, pad, training.seed)
    collator = DraftCollator(
        data.examples,
        pad,
        packed=training.packing,
        states=states,
        top=asked.needs_target and not full,
    )
    return Distillation(shared_vocabulary_size(run.target), objective, collator, target, on_policy)


def heads_lesson(run: Run, data: TrainingData, *, max_length: int, packed: bool) -> HeadsLesson:
    """The objective as configured, the target's states at the supervised positions, and its ends, which heads share."""
    dtype, device = run.config.target.target_dtype, "cpu" if run.config.model.shard_target else None
    load_model = cache(lambda: run.target_model(dtype, device))
    states = _states(run, data, load_model, max_length) if run.config.objective.cache_target_states else None
    model = load_model()
    if run.config.model.shard_target:
        shard_layers(model, init_device_mesh(run.device.type, (run.state.num_processes,)))
    target = TargetOutput(
        output_projection(model, run.target.config),
        model if states is None else None,
        model.get_input_embeddings(),
        sharded=run.config.model.shard_target,
    )
    return HeadsLesson(
        _objective(run), HeadsCollator(data.examples, _pad_token_id(run), packed=packed, states=states), target
    )


def lesson_trainer(run: Run, heads: DraftHeads, lesson: HeadsLesson, arguments: TrainingArguments) -> Trainer:
    """The trainer of `heads`: on the target as it is, or with adapters on it that learn as well (Medusa-2)."""
    asked: HeadsArguments = run.config.model
    if not asked.changes_target:
        return heads_trainer(
            heads,
            lesson.collator,
            arguments,
            objective=lesson.objective,
            target=lesson.target,
            decay=asked.head_loss_decay,
            pack_tokens=asked.pack_tokens or None,
        )
    if lesson.target.model is None:
        raise ConfigError("target_lora_rank: the target is not loaded; set cache_target_states: false")
    target = add_target_adapters(lesson.target.model, asked, run.target.identity.model_id, seed=arguments.seed)
    return medusa2_trainer(
        HeadsAndTarget(heads, target),
        lesson.collator,
        arguments,
        objective=lesson.objective,
        target=lesson.target,
        decay=asked.head_loss_decay,
        target_learning_rate=asked.target_learning_rate,
        target_loss_weight=asked.target_loss_weight,
        pack_tokens=asked.pack_tokens or None,
    )
