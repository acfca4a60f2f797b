"""Owns reading draft heads from disk: a checkpoint of the trainer, or an export, in the field's tensor names.

The tensors alone say what the heads are. A copy of the target's projection (`0.{L}.weight` and none for other heads,
which vLLM needs) is passed over.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdist import provenance
from specdist.drafter_config import HYDRA, LOW_RANK, MEDUSA, OWN, SHARED
from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.errors import ArtifactError
from specdist.tree import DraftTree

HEADS_FILE = "medusa_lm_head.safetensors"
CHECKPOINT_FILE = "model.safetensors"  # the name is the trainer's
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


def heads_file(directory: Path) -> Path:
    """The heads' weights in an export, or in a checkpoint of the trainer."""
    exported = directory / HEADS_FILE
    return exported if exported.exists() else directory / CHECKPOINT_FILE


def draft_tree(directory: Path, num_heads: int) -> DraftTree | None:
    """The tree that lies with exported heads (`medusa_choices` in config.json), if one does.

    Raises ConfigError where so many heads cannot draft it.
    """
    paths = provenance.read_json(directory / "config.json").get("medusa_choices")
    return None if paths is None else DraftTree.of(paths, num_heads)


def heads_shape(tensors: dict[str, Tensor], vocab_size: int, where: Path | str) -> HeadsShape:
    """What heads `tensors` are; `vocab_size` is the target's, for heads without a projection. Raises ArtifactError."""
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise ArtifactError(f"{where}: no tensor named like 0.0.linear.weight; got {sorted(tensors)[:4]}")
    num_heads, num_layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    own = f"{num_heads - 1}.{num_layers}.weight"
    kind = HYDRA if "0.0.skip.weight" in tensors else MEDUSA
    hidden_size = tensors[blocks[0][0]].shape[0]
    if "0.up.weight" in tensors:
        vocab_size, rank = tensors["0.up.weight"].shape
        return HeadsShape(num_heads, num_layers, hidden_size, vocab_size, kind, LOW_RANK, rank)
    # Of one head, its own projection and a copy of the target's look the same, and mean the same
    if own in tensors:
        return HeadsShape(num_heads, num_layers, hidden_size, tensors[own].shape[0], kind, OWN)
    return HeadsShape(num_heads, num_layers, hidden_size, vocab_size, kind, SHARED)


def heads_of(tensors: dict[str, Tensor], vocab_size: int, where: Path | str) -> DraftHeads:
    """Heads in fp32 from their tensors, which must be complete and alike. Raises ArtifactError naming what is not."""
    shape = heads_shape(tensors, vocab_size, where)
    with torch.device("meta"):
        heads = DraftHeads(shape)
    expected = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    copied = {f"0.{shape.num_layers}.weight"} - expected.keys()
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in copied}
    if expected != found:
        wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise ArtifactError(
            f"{where}: not {shape.num_heads} heads of {shape.num_layers} blocks; wrong or missing: {wrong[:6]}"
        )
    heads.load_state_dict({name: tensors[name].float() for name in expected}, assign=True)
    return heads.requires_grad_(True)


def load_heads(path: Path, vocab_size: int) -> DraftHeads:
    """Heads in fp32 from a safetensors file. Raises ArtifactError where it is missing, cut or incomplete."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: draft heads cannot be read ({error}); the file is missing or cut") from error
    return heads_of(tensors, vocab_size, path)
