"""Owns the export of a draft model: a Hugging Face directory that vLLM (`draft_model`), SGLang (STANDALONE) and
transformers (`assistant_model`) read as it is."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdist import provenance
from specdist.drafters.vocabulary import VOCABULARY_FILE, mute_others, shared_vocabulary_size, write_vocabulary
from specdist.errors import ConfigError
from specdist.export.record import ExportRecord, check_read_back, copy_tokenizer, write_record
from specdist.target import Target


def speculative_config(model: str, num_speculative_tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config` for a draft model at path `model`."""
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num_speculative_tokens}


def _legacy_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 calls the `rope_parameters` of transformers 5: of one kind of layer, or by kind of layer."""
    legacy: dict[str, Any] = {}
    if isinstance(sliding := rope.get("sliding_attention"), dict):
        legacy["rope_local_base_freq"] = sliding["rope_theta"]
    rope = dict(rope.get("full_attention") or rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := rope.pop(key, None)) is not None:
            legacy[key] = value
    if rope.get("rope_type", "default") != "default":
        legacy["rope_scaling"] = rope
    return legacy


def _mirror_legacy_keys(directory: Path) -> None:
    """Write transformers 4's keys beside those of transformers 5: older readers would fall back to defaults."""
    config = provenance.read_json(directory / "config.json")
    config.pop("_name_or_path", None)
    config |= _legacy_rope(config.get("rope_parameters") or {})
    config["torch_dtype"] = config.get("dtype")
    provenance.write_json(directory / "config.json", config)


def _eos_conflict(target: Target) -> list[str]:
    """That the target's files do not name the same EOS ids, in words; nothing where they do."""
    path = target.path / "generation_config.json"
    generation = provenance.read_json(path) if path.exists() else {}
    named = {
        "config.json": target.config.get_text_config().eos_token_id,
        path.name: generation.get("eos_token_id"),
        "tokenizer": target.tokenizer.eos_token_id,
    }
    ids = {name: [eos] if isinstance(eos, int) else sorted(eos) for name, eos in named.items() if eos is not None}
    if len({tuple(value) for value in ids.values()}) < 2:
        return []
    told = ", ".join(f"{name} {value}" for name, value in ids.items())
    return [f"the target names its EOS ids differently ({told}); the draft has all of them"]


def _known_limits(target: Target, vocabulary_ids: Tensor | None) -> list[str]:
    limits = ["vLLM needs the same tensor parallelism for draft and target", *_eos_conflict(target)]
    vocab_size = target.identity.vocab_size
    if vocabulary_ids is not None:
        limits.append(
            f"it proposes {len(vocabulary_ids)} of {vocab_size} tokens ({VOCABULARY_FILE}): our own decoder computes "
            "those alone; engines compute all and propose none of the others while they draft greedily, but can with "
            "sampled drafts, which lowers their acceptance"
        )
    return limits


def _assistant_defaults(model: PreTrainedModel, target: Target, num_speculative_tokens: int) -> GenerationConfig:
    """What transformers reads of an assistant model: it drafts a fixed number of tokens."""
    return GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=target.tokenizer.pad_token_id,
        num_assistant_tokens=num_speculative_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def export_draft_model(
    model: PreTrainedModel,
    target: Target,
    directory: Path,
    *,
    dtype: torch.dtype,
    num_speculative_tokens: int,
    checkpoint_step: int,
    vocabulary_ids: Tensor | None = None,
) -> ExportRecord:
    """Write `model` in `dtype` with the target's tokenizer and EOS set to `directory`, atomically.

    The projection has all rows of the target's vocabulary; those that are padding, or not in a reduced vocabulary
    `vocabulary_ids` [R], are made so that no engine proposes them (`mute_others`). The ids are written beside it, by
    which our own decoder leaves the others out.

    Raises ConfigError where the vocabulary sizes differ (vLLM compares them), ArtifactError on a failed read-back.
    """
    vocab_size = model.config.get_text_config().vocab_size
    if vocab_size != target.identity.vocab_size:
        raise ConfigError(
            f"draft vocab_size {vocab_size} != target vocab_size {target.identity.vocab_size}: "
            "engines refuse such a pair; train the draft from a model resized to the target's vocabulary"
        )
    eos = target.identity.eos_token_ids
    # A copy, since `to` would convert the caller's own model. Its wrapper in transformers has no usable type.
    model = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
    shared = torch.arange(shared_vocabulary_size(target))
    mute_others(model, shared if vocabulary_ids is None else vocabulary_ids)
    # Engines go by the key and drop the projection where it says tied, whatever the tensors are.
    model.config.tie_word_embeddings = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.config.eos_token_id = eos[0] if len(eos) == 1 else eos
    model.generation_config = _assistant_defaults(model, target, num_speculative_tokens)
    with provenance.atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        copy_tokenizer(target.path, temporary)
        _mirror_legacy_keys(temporary)
        if vocabulary_ids is not None:
            write_vocabulary(temporary, vocabulary_ids, vocab_size)
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        check_read_back(temporary, {name: t for name, t in model.state_dict().items() if name not in tied})
        return write_record(
            temporary,
            ExportRecord(
                format="hf-causal-lm",
                drafter_kind="draft_model",
                target=target.identity,
                lossless=True,
                num_parameters=model.num_parameters(),
                checkpoint_step=checkpoint_step,
                speculative_config=speculative_config(".", num_speculative_tokens),
                engines={"vllm": "0.32.0 (draft_model)", "transformers": "5 (assistant_model)"},
                known_limits=_known_limits(target, vocabulary_ids),
            ),
        )
