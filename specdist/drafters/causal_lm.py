"""Owns the draft model at work: a small causal LM that shares the target's tokenizer. Loads it, drafts with it.

Shapes: N drafted tokens, V vocabulary of the target, R ids that the draft may propose.
"""

from pathlib import Path

import torch
from peft import PeftModel, prepare_model_for_kbit_training
from torch import Tensor
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from specdist.drafter_config import DraftArguments
from specdist.drafters.adapter import ADAPTER_CONFIG, add_adapters, check_4bit, load_adapter, merge_adapter
from specdist.drafters.base import BatchDrafter, DecodeContext, Proposal
from specdist.drafters.causal_lm_rows import DraftModelRows, block_proposal
from specdist.drafters.drawing import Blocks
from specdist.drafters.one_by_one import OneByOne
from specdist.drafters.vocabulary import (
    DraftVocabulary,
    read_vocabulary,
    restrict_projection,
    shared_vocabulary_size,
)
from specdist.errors import ArtifactError, ConfigError
from specdist.in_place import fits_in_place
from specdist.target import Target, cache_argument, chain_inputs, check_projection, empty_cache, new_cache
from specdist.tree import DraftTree
from specdist.weights import load_causal_lm


def _load(
    path: str | Path, dtype: torch.dtype, device: torch.device | str, quantisation: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    options = {"quantization_config": quantisation} if quantisation else {}
    model = load_causal_lm(path, dtype, device_map={"": device}, **options)
    check_projection(model)
    return model


def check_reads_targets_texts(config: PretrainedConfig, target: Target) -> None:
    """Raise ConfigError where a draft model cannot draft in all texts of `target`.

    That is where its cache cannot take tokens back (`empty_cache`), and where it has a table of positions, as
    GPT-2 does, that ends before the target's context. Rotary positions have no end.
    """
    empty_cache(config)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or getattr(text, "rope_parameters", None):
        return
    if target.context_length is None or positions < target.context_length:
        raise ConfigError(
            f"draft model {config.model_type}: it has {positions} positions, the target reads "
            f"{target.context_length or 'texts of any length'}; take a draft that reads as far"
        )


def load_draft_model(
    path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu", *, base: Path | None = None
) -> PreTrainedModel:
    """Load a causal LM with its full vocabulary, in evaluation mode.

    A checkpoint of adapters is merged into `base`, the run's initial draft, in float32, whatever it was trained on.
    Raises ArtifactError where it cannot be read or lacks a tensor, or where the adapters do not fit.
    """
    if not (Path(path) / ADAPTER_CONFIG).exists():
        return _load(path, dtype, device)
    if base is None:
        raise ArtifactError(f"draft model {path}: holds adapters only; give the initial draft that they belong to")
    merged = merge_adapter(load_adapter(_load(base, torch.float32, device), Path(path)))
    return merged.to(dtype).eval()  # type: ignore[arg-type] # its wrapper in transformers has no usable type


def trainable_draft(
    init: Path, arguments: DraftArguments, device: torch.device | str, *, seed: int = 0
) -> PreTrainedModel | PeftModel:
    """The initial draft in directory `init` as it is trained: whole in fp32, or with adapters on a frozen base.

    `seed` draws the adapters' initial values. Raises ConfigError where the adapters do not fit (`check_adapters`).
    """
    if not arguments.lora_rank:
        return load_draft_model(init, torch.float32, device)
    if not arguments.load_in_4bit:
        return add_adapters(load_draft_model(init, torch.float32, device), arguments, seed=seed)
    check_4bit()
    # QLoRA (Dettmers et al. 2023): NF4 with quantised constants, products in bf16
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = prepare_model_for_kbit_training(
        _load(init, torch.bfloat16, device, four_bit),
        use_gradient_checkpointing=False,  # the trainer's own setting decides
    )
    return add_adapters(base, arguments, seed=seed)


def load_for_drafting(
    path: Path, target: Target, dtype: torch.dtype, device: torch.device | str = "cpu", *, base: Path | None = None
) -> tuple[PreTrainedModel, DraftVocabulary]:
    """A draft model and the ids that it may propose: for `DraftModelDrafter` and `DraftModelScorer`.

    `base`: the run's initial draft, for a checkpoint: its reduced vocabulary (and what its adapters need) lies there.
    With a reduced vocabulary the projection has its rows alone, [R, D]. Raises as `load_draft_model` and
    `check_reads_targets_texts`, and ArtifactError where the vocabulary belongs to another target.
    """
    model = load_draft_model(path, dtype, device, base=base)
    check_reads_targets_texts(model.config, target)
    vocabulary = draft_vocabulary(base or path, target).to(model.device)
    return restrict_projection(model, vocabulary), vocabulary


def draft_vocabulary(directory: Path, target: Target) -> DraftVocabulary:
    """The ids that the draft model in `directory` may propose: its reduced vocabulary, else all of the tokenizer's.

    Raises ArtifactError where the file there names ids that the target's tokenizer lacks.
    """
    shared, ids = shared_vocabulary_size(target), read_vocabulary(directory)
    if ids is None:
        return DraftVocabulary.first(shared, target.identity.vocab_size)
    if int(ids[-1]) >= shared:
        raise ArtifactError(
            f"{directory}: its draft vocabulary has id {int(ids[-1])}, the target's tokenizer ends at {shared - 1}; "
            "it belongs to another target"
        )
    return DraftVocabulary(ids, target.identity.vocab_size)


def fitted_vocabulary(model: PreTrainedModel, vocabulary: DraftVocabulary | int) -> DraftVocabulary:
    """`vocabulary` on the device of `model`, whose logits have a column for each of its ids; an int V is all below V.

    Of a model with fewer rows than V those that there are can be proposed. Raises ConfigError where the ids are a
    reduced set and the projection has not been cut to them (`restrict_projection`).
    """
    rows = model.get_output_embeddings().weight.shape[0]
    if isinstance(vocabulary, int):
        vocabulary = DraftVocabulary.first(vocabulary, vocabulary)
    if not vocabulary.is_prefix and rows != len(vocabulary):
        raise ConfigError(
            f"draft model with {rows} vocabulary rows for a reduced vocabulary of {len(vocabulary)}: "
            "open it by load_for_drafting"
        )
    return DraftVocabulary(vocabulary.ids[:rows].to(model.device), vocabulary.size)


class DraftModelDrafter:
    """Drafts token by token with a causal LM and its own KV cache."""

    max_draft_tokens: int | None = None
    tree: DraftTree | None = None

    def __init__(self, model: PreTrainedModel, vocabulary: DraftVocabulary | int) -> None:
        """`vocabulary`: the ids that may be proposed, or the target's V for all below it."""
        self.model = model
        self.vocabulary = fitted_vocabulary(model, vocabulary)
        self.reset()

    def reset(self) -> None:
        self.cache = new_cache(self.model)

    def _logits(self, fresh: Tensor) -> Tensor:
        """Next-token logits [1, R] after feeding the tokens [1, T] that the cache does not hold yet."""
        inputs = chain_inputs(self.model, self.cache, fresh.shape[1])
        cache = {cache_argument(self.model): self.cache, "use_cache": True}
        output = self.model(input_ids=fresh, **inputs, **cache, logits_to_keep=1)
        return output.logits[:, -1, : len(self.vocabulary)].float()

    @torch.inference_mode()
    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        fresh = torch.tensor([context.token_ids[self.cache.get_seq_length() :]], device=self.model.device)  # [1, T]
        drafts, blocks = [], Blocks([context], [max_tokens])
        while blocks.drafting:
            drafts.append(self.vocabulary.ids[blocks.draw(self._logits(fresh))])  # [1], stays on the device
            fresh = drafts[-1][None]
        return block_proposal(torch.cat(drafts), blocks.probs(0), self.vocabulary)

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        # The newest token has not been fed. The last draft never was either, so there may be nothing to cut.
        excess = self.cache.get_seq_length() - (num_committed - 1)
        if excess > 0:
            self.cache.crop(-excess)

    def batched(self, count: int, width: int) -> BatchDrafter:
        if fits_in_place(self.model):
            return DraftModelRows(self.model, self.vocabulary, count, width)
        return OneByOne([DraftModelDrafter(self.model, self.vocabulary) for _ in range(count)])
