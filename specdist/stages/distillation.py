"""Owns what a draft model is taught with: the objective, and where the target's distributions come from.

Either its stored best tokens, or its states: kept on disk beside the dataset, or computed at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedModel

from specdist.dataset.features import TargetStates, target_states
from specdist.drafters.vocabulary import shared_vocabulary_size
from specdist.losses import Objective
from specdist.stages.data import TrainingData
from specdist.stages.run import Run
from specdist.training.batches import DraftCollator
from specdist.training.draft import TargetOutput, output_projection
from specdist.training.on_policy import OnPolicy


@dataclass(frozen=True)
class Distillation:
    """What `draft_trainer` needs beside the model and the trainer's arguments."""

    num_tokens: int
    objective: Objective
    collator: DraftCollator
    target: TargetOutput | None
    on_policy: OnPolicy | None


def _states(run: Run, data: TrainingData, load_model: Callable[[], PreTrainedModel]) -> TargetStates:
    dtype, length = run.config.target.target_dtype, run.config.training.max_length
    name = f"states-{length}-{dtype}-{data.manifest.rows_sha256[:12]}-{run.target.identity.weights_sha256[:12]}"
    hidden_size = run.target.config.get_text_config().hidden_size
    return target_states(data.directory / name, data.examples, load_model, hidden_size=hidden_size)


def distillation(run: Run, data: TrainingData) -> Distillation:
    """The objective as configured, and the target's side of it; the target is loaded only where that is needed."""
    asked, training = run.config.objective, run.config.training
    temperature = asked.objective_temperature or run.config.data.eval_temperature
    objective = Objective(asked.weights, temperature, asked.jensen_shannon_beta)
    full = asked.needs_target and asked.target_distribution == "full"
    load_model = cache(lambda: run.target_model(run.config.target.target_dtype))
    states = _states(run, data, load_model) if full and asked.cache_target_states else None
    eos = run.target.identity.eos_token_ids
    pad = run.target.tokenizer.pad_token_id
    pad = eos[0] if pad is None else pad
    target = None
    if full or asked.on_policy_share:
        model = load_model()
        live = asked.on_policy_share or states is None
        target = TargetOutput(output_projection(model, run.target.config), model if live else None)
    on_policy = None
    if asked.on_policy_share:
        on_policy = OnPolicy(asked.on_policy_share, temperature, eos, pad, training.seed)
    collator = DraftCollator(
        data.examples,
        pad,
        packed=training.packing,
        states=states,
        top=asked.needs_target and not full,
    )
    return Distillation(shared_vocabulary_size(run.target), objective, collator, target, on_policy)
