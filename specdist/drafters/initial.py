"""Owns the draft model before training: checked for its target without loading weights, made, and written to disk.

Shapes: S ids of the target's tokenizer, R ids of a reduced vocabulary.
"""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from specdist import provenance
from specdist.drafter_config import DraftArguments, TrainedSize
from specdist.drafters.adapter import trained_size
from specdist.drafters.causal_lm import check_reads_targets_texts, load_draft_model
from specdist.drafters.prune import choose_layers, planned_layers, prune_layers
from specdist.drafters.vocabulary import (
    check_same_tokenizer,
    mute_padding,
    select_vocabulary,
    shared_vocabulary_size,
    write_vocabulary,
)
from specdist.errors import ArtifactError, ConfigError
from specdist.record import Record
from specdist.target import Target

logger = logging.getLogger(__name__)

ORIGIN_FILE, ORIGINAL_GENERATION_FILE = "origin.json", "generation_config.original.json"
PRUNE = "prune"


@dataclass(frozen=True)
class DraftOrigin(Record):
    """Where an initial draft comes from. `layers` are the target's, None unless pruned; `block_influence` is of every
    layer of the target where the rule importance measured it; `vocabulary_coverage` is the share of training tokens
    inside a reduced vocabulary."""

    init: str
    layers: list[int] | None = None
    block_influence: list[float] | None = None
    vocabulary_coverage: float | None = None


def _external_config(init: str, target: Target) -> PretrainedConfig:
    try:
        tokenizer = AutoTokenizer.from_pretrained(init)
        config = AutoConfig.from_pretrained(init)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"init {init!r}: no causal LM with a tokenizer can be read from it ({error})") from error
    check_same_tokenizer(target.tokenizer, tokenizer, init)
    rows = config.get_text_config().vocab_size
    if rows < shared_vocabulary_size(target):
        raise ConfigError(
            f"init {init!r}: token {tokenizer.convert_ids_to_tokens(rows)!r} has id {rows}, but the model has only "
            f"{rows} embedding rows; resize and train it first, rows are never made up"
        )
    return config


def check_draft_model(arguments: DraftArguments, target: Target) -> TrainedSize:
    """Check, without loading weights, that the draft can be made for `target`; returns its size.

    Raises TokenizerMismatch, ArtifactError (no such model) or ConfigError (layers, vocabulary, adapters, positions or a
    cache that cannot be).
    """
    config = target.config if arguments.init == PRUNE else _external_config(arguments.init, target)
    check_reads_targets_texts(config, target)
    if arguments.draft_vocab_size:
        counts = torch.zeros(shared_vocabulary_size(target))
        select_vocabulary(counts, arguments.draft_vocab_size, target.identity.eos_token_ids)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if arguments.init == PRUNE:
            model = prune_layers(model, planned_layers(arguments, config.get_text_config().num_hidden_layers))
    return trained_size(model, arguments)


def _external_draft(init: str, target: Target) -> PreTrainedModel:
    """Another model in fp32. A vocabulary that differs in padding is brought to the target's size, which engines
    compare; rows that are added are zero in the embeddings, and never proposed by the projection."""
    model = load_draft_model(init, torch.float32)
    before, vocab_size = model.config.get_text_config().vocab_size, target.identity.vocab_size
    if before != vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        model.get_input_embeddings().get_parameter("weight").data[before:] = 0.0
        mute_padding(model, shared_vocabulary_size(target))
    return model


def make_draft_model(
    arguments: DraftArguments, target: Target, sample_texts: Sequence[Sequence[int]] = ()
) -> tuple[PreTrainedModel, DraftOrigin]:
    """The initial draft in fp32, with the full vocabulary of the target, and where it comes from.

    `init` "prune" cuts it from the target, else it names any causal LM with the target's tokenizer. `sample_texts`
    (token ids of training text) are what the layer rule importance measures on. Raises as `check_draft_model`.
    """
    check_draft_model(arguments, target)
    if arguments.init != PRUNE:
        name = Path(arguments.init).name if Path(arguments.init).is_dir() else arguments.init
        return _external_draft(arguments.init, target), DraftOrigin(name)
    full = target.load_model(torch.float32)
    layers, influence = choose_layers(arguments, full, sample_texts)
    logger.info("draft model: layers %s of %d of the target", layers, full.config.get_text_config().num_hidden_layers)
    return prune_layers(full, layers), DraftOrigin(PRUNE, layers, None if influence is None else influence.tolist())


def _keep_generation_config(source: str | Path, directory: Path) -> None:
    """Copy that of `source` as it is. How a draft samples the target says, and some cannot be saved in a checkpoint:
    transformers refuses a temperature without sampling."""
    found = cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if found is not None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, directory / ORIGINAL_GENERATION_FILE)


def write_initial_draft(
    directory: Path,
    arguments: DraftArguments,
    target: Target,
    sample_texts: Sequence[Sequence[int]] = (),
    token_counts: Tensor | None = None,
) -> DraftOrigin:
    """Write the initial draft, where it comes from, and its reduced vocabulary if it has one, to `directory`.

    `token_counts` [S or more]: how often the target wrote each id, for a reduced vocabulary. A resumed run reads what
    is there and chooses nothing again. Raises as `check_draft_model`.
    """
    model, origin = make_draft_model(arguments, target, sample_texts)
    if arguments.draft_vocab_size:
        if token_counts is None:
            raise ArtifactError("draft_vocab_size: needs the counts of the training tokens; build the dataset first")
        counts = token_counts[: shared_vocabulary_size(target)]
        ids = select_vocabulary(counts, arguments.draft_vocab_size, target.identity.eos_token_ids)
        coverage = float(counts[ids].sum() / counts.sum().clamp(min=1))
        logger.info("draft model: %d of %d tokens, %.1f %% of the training text", len(ids), len(counts), 100 * coverage)
        write_vocabulary(directory, ids, target.identity.vocab_size)
        origin = replace(origin, vocabulary_coverage=coverage)
    # As engines go by it: they drop the projection where it says tied
    model.config.tie_word_embeddings = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    _keep_generation_config(target.path if arguments.init == PRUNE else arguments.init, directory)
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    model.save_pretrained(directory)
    provenance.write_json(directory / ORIGIN_FILE, origin.to_json())
    return origin
