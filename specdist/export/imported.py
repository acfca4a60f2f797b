"""Owns reading Medusa heads that were trained elsewhere, and writing them as an export of ours.

Layouts: FasterDecoding's (original, TGI), vLLM's own (`blocks.{i}.layers.{j}`, `lm_heads.{i}`), and ModelOpt's, where
heads lie in the target's checkpoint under `medusa_heads.`. The tensors say what the heads are, whatever config.json
says.
"""

import difflib
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdist import provenance
from specdist.drafter_config import SHARED
from specdist.drafters.heads import DraftHeads
from specdist.drafters.heads_file import HEADS_FILE, heads_of, heads_shape
from specdist.errors import ArtifactError, ConfigError
from specdist.export.convert import check_output
from specdist.export.medusa import export_medusa
from specdist.export_record import EXPORT_FILE, ExportRecord, read_record
from specdist.safetensors_file import read_header
from specdist.target import Target
from specdist.tree import DraftTree

logger = logging.getLogger(__name__)

_PATTERNS = (HEADS_FILE, "medusa_lm_head.pt", "*.safetensors", "*.bin", "*.pt")  # the first that is there is read
# FasterDecoding's, vLLM's (`configs/medusa.py`) and what transformers adds when it saves them
_CONFIG_KEYS = frozenset({
    "model_type", "medusa_num_heads", "num_heads", "medusa_num_layers", "num_layers", "num_hidden_layers",
    "hidden_size", "vocab_size", "truncated_vocab_size", "max_paths", "topk", "max_seq_len", "medusa_choices",
    "medusa_fc_bias", "original_lm_head", "base_model_name_or_path", "version", "architectures", "dtype",
    "torch_dtype", "transformers_version",
})  # fmt: skip
_PREFIX = re.compile(r"^(?:.*\.)?medusa_heads?\.")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"^lm_heads\.(\d+)\.weight$")


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    for pattern in _PATTERNS:
        if files := sorted(source.glob(pattern)):
            return files
    raise ArtifactError(f"{source}: no heads there; expected a file, or a directory with one of {', '.join(_PATTERNS)}")


def _load(file: Path) -> dict[str, Tensor]:
    """The tensors of a file. No code that a pickle may hold is run. Raises ArtifactError where that is not enough."""
    try:
        if file.suffix == ".safetensors":
            read_header(file)  # says what is wrong where the library would not
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ArtifactError(
            f"{file}: cannot be read as tensors alone ({type(error).__name__}); it is cut, or holds objects of other "
            "kinds: save its state dict as safetensors where it was made"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ArtifactError(f"{file}: expected a state dict, names with tensors; save one where it was made")
    return tensors


def _field_name(name: str, num_layers: int) -> str:
    if block := _BLOCK.match(name):
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    if projection := _PROJECTION.match(name):
        return f"{projection[1]}.{num_layers}.weight"
    return f"0.{num_layers}.weight" if name == "lm_head.weight" else name


def field_tensors(tensors: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Tensors of any known layout under FasterDecoding's names; blocks without a bias get one of zeros.

    Raises ArtifactError on a reduced vocabulary, and on a tensor under two names.
    """
    if any(_PREFIX.match(name) for name in tensors):  # the rest is the target's own
        tensors = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items() if _PREFIX.match(name)}
    if "token_map" in tensors:
        raise ArtifactError(f"{where}: heads of a reduced vocabulary (token_map); expected all of the target's tokens")
    layers = [int(block[2]) for name in tensors if (block := _BLOCK.match(name))]
    layers += [int(name.split(".")[1]) for name in tensors if re.fullmatch(r"\d+\.\d+\.linear\.weight", name)]
    named = {_field_name(name, 1 + max(layers, default=0)): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise ArtifactError(
            f"{where}: {len(tensors)} tensors have {len(named)} meanings; expected each under one name: remove "
            f"what is there twice, {sorted(tensors)[:6]}"
        )
    if not any(name.endswith(".linear.bias") for name in named):
        for name in [name for name in named if name.endswith(".linear.weight")]:
            named[name.removesuffix("weight") + "bias"] = named[name].new_zeros(named[name].shape[0])
    return named


def _check_dtypes(tensors: dict[str, Tensor], where: Path) -> None:
    """Raise ArtifactError unless all tensors are of one floating-point dtype, as every trainer of heads saves them."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    if len(by_dtype) > 1 or not all(dtype.is_floating_point for dtype in by_dtype):
        rarest = min(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
        raise ArtifactError(
            f"{where}: dtypes {sorted(map(str, by_dtype))}, {rarest} at {sorted(by_dtype[rarest])[:4]}; expected one "
            "floating-point dtype: save the heads again where they were made"
        )


def _read_config(source: Path) -> dict[str, Any]:
    """config.json beside the heads; empty where there is none. Raises ArtifactError on a missing or an unknown key.

    A target's own configuration, in whose checkpoint heads may lie, has its own keys.
    """
    file = (source if source.is_dir() else source.parent) / "config.json"
    if not file.is_file():
        return {}
    config = provenance.read_json(file)
    if not isinstance(config, dict):
        raise ArtifactError(f"{file}: expected a JSON object, got {type(config).__name__}")
    if "medusa" in config or (file.parent / EXPORT_FILE).is_file():
        return config
    if unknown := sorted(config.keys() - _CONFIG_KEYS):
        near = difflib.get_close_matches(unknown[0], _CONFIG_KEYS, n=1, cutoff=0.0)[0]
        raise ArtifactError(f"{file}: unknown keys {unknown[:4]}; did you mean {near!r}? Correct or remove them")
    if _claimed_heads(config) is None:
        raise ArtifactError(f"{file}: missing key 'medusa_num_heads'; add the number of heads, or remove the file")
    return config


def _claimed_heads(config: dict[str, Any]) -> int | None:
    inner = config.get("medusa") or {}
    found = (config.get("medusa_num_heads"), config.get("num_heads"), inner.get("num_medusa_heads"))
    return next((number for number in found if number is not None), None)


def _with_changed_projection(
    tensors: dict[str, Tensor], num_heads: int, name: str, weight: Tensor
) -> dict[str, Tensor]:
    """Where the projection `name` that all heads share is not the target's `weight` [V, D], each head gets a copy."""
    suffix, copy = name.split(".", 1)[1], tensors.get(name)
    if copy is None or any(f"{i}.{suffix}" in tensors for i in range(1, num_heads)):
        return tensors
    if torch.equal(copy, weight.to(copy.dtype)):
        return tensors
    logger.warning("the heads share a projection that is not the target's: each gets a copy of it")
    return tensors | {f"{i}.{suffix}": copy for i in range(num_heads)}


def read_foreign_heads(source: Path, target: Target) -> tuple[DraftHeads, torch.dtype, Tensor]:
    """Heads in fp32 from a file or directory of any known layout, the dtype they had, the target's projection [V, D].

    Raises ArtifactError where tensors are missing, left over or unreadable, ConfigError where they are not `target`'s.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(source):
        tensors |= _load(file)
    tensors = field_tensors(tensors, source)
    _check_dtypes(tensors, source)
    shape = heads_shape(tensors, target.identity.vocab_size, source)
    expected = (target.identity.vocab_size, target.config.get_text_config().hidden_size)
    if (shape.vocab_size, shape.hidden_size) != expected:
        raise ConfigError(
            f"{source}: heads of vocabulary {shape.vocab_size} and hidden size {shape.hidden_size}, but "
            f"{target.identity.model_id} has {expected[0]} and {expected[1]}; give the target they were trained on"
        )
    dtype = next(iter(tensors.values())).dtype
    weight = target.load_model(dtype).get_output_embeddings().weight
    if shape.projection == SHARED:
        tensors = _with_changed_projection(tensors, shape.num_heads, f"0.{shape.num_layers}.weight", weight)
    return heads_of(tensors, target.identity.vocab_size, source), dtype, weight


def import_heads(source: Path, output: Path, target: Target) -> ExportRecord:
    """Write heads trained elsewhere (`read_foreign_heads`), with their tree, to `output` as an export for `target`.

    A number of heads in config.json other than that of the tensors is a warning, since published ones are wrong; a
    missing or an unknown key is an error. Raises as the reading does, and ConfigError on a tree that the heads cannot
    draft.
    """
    check_output(output)
    if (source / EXPORT_FILE).is_file():  # one of ours: its files must be those that were exported
        read_record(source)
    config = _read_config(source)
    heads, dtype, weight = read_foreign_heads(source, target)
    claimed, paths = _claimed_heads(config), config.get("medusa_choices")
    if claimed not in (None, heads.num_heads):
        logger.warning(
            "%s: config.json says %s heads, the tensors are of %d; these decide", source, claimed, heads.num_heads
        )
    return export_medusa(
        heads,
        weight,
        target,
        output,
        dtype=dtype,
        num_speculative_tokens=heads.num_heads,
        checkpoint_step=0,
        draft_tree=None if paths is None else DraftTree.of(paths, heads.num_heads),
    )
