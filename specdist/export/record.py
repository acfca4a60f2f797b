"""Owns what all exporters do before they write the record: the tokenizer copied, the weights read back and compared.

Every exporter writes into a temporary directory, reads the weights back, compares them, and only then renames.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdist.errors import ArtifactError, ConfigError
from specdist.export_record import EXPORT_FILE, ExportRecord, read_record, write_record
from specdist.target import Target

logger = logging.getLogger(__name__)

__all__ = [
    "EXPORT_FILE",
    "ExportRecord",
    "check_made_for",
    "check_read_back",
    "copy_tokenizer",
    "read_record",
    "write_record",
]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


def check_made_for(record: ExportRecord, target: Target) -> None:
    """Raise ConfigError unless the export was made for `target`, by the hash of its weights.

    Warns where its tokenizer or chat template is another: the drafter drafts for prompts that it was not trained on.
    """
    if target.identity.weights_sha256 != record.target.weights_sha256:
        raise ConfigError(
            f"target {target.identity.model_id}: weights {target.identity.weights_sha256[:12]}, but the export was "
            f"made for {record.target.model_id} with {record.target.weights_sha256[:12]}; give that one"
        )
    if others := record.target.differences(target.identity):
        logger.warning(
            "target %s: its %s is not the one that the drafter was trained and measured with, so fewer of its tokens "
            "are accepted; give the target as it was",
            target.identity.model_id,
            " and ".join(others),
        )


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the target's tokenizer files byte for byte. Raises ArtifactError where the source has none."""
    found = [name for name in _TOKENIZER_FILES if (source / name).exists()]
    for name in found:
        shutil.copyfile(source / name, destination / name)  # not its mode, which may forbid to write
    if not found:
        raise ArtifactError(f"{source}: holds no tokenizer files; a draft model is served with the target's tokenizer")


def check_read_back(directory: Path, expected: Mapping[str, Tensor]) -> None:
    """Read every safetensors file of `directory` and compare names, shapes, dtypes and values with `expected`.

    Raises ArtifactError on any difference.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    if found.keys() != expected.keys():
        wrong = sorted(found.keys() ^ expected.keys())
        raise ArtifactError(f"{directory}: tensors missing or too many after writing: {wrong[:6]}; export again")
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor.cpu()):
            raise ArtifactError(f"{directory}: tensor {name} read back differs from the one written; export again")
