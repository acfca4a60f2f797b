"""Owns opening a drafter that a person names, beside the target that verifies it, for the real decoder."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist.drafter_config import HEAD_KINDS
from specdist.drafters.adapted_target import ADAPTER_DIRECTORY, adapted_target
from specdist.drafters.base import Drafter
from specdist.drafters.causal_lm import DraftModelDrafter, load_for_drafting
from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.heads_file import draft_tree, heads_file, load_heads
from specdist.drafters.ngram import NgramDrafter
from specdist.errors import ConfigError
from specdist.export.convert import find_export
from specdist.export.record import EXPORT_FILE, ExportRecord, check_made_for, read_record
from specdist.registry.names import named_version
from specdist.target import Target

ALONE = "target alone"
_NGRAM_LENGTH = 4
_WORDS = {"draft_model": "draft model", "medusa": "Medusa heads", "hydra": "Hydra heads"}


@dataclass(frozen=True)
class DrafterChoice:
    """What shall draft: `name` is an export, a run, or MODEL[@N] of the registry at `root`; else n-grams, or nothing.

    `num_speculative_tokens`: tokens of a block, of a tree its levels; None: what the export was measured best with.
    """

    name: str | None = None
    ngram: bool = False
    tree: bool = False
    num_speculative_tokens: int | None = None
    root: Path = Path("runs/registry")

    def length(self, usual: int, longest: int | None = None) -> int:
        """Tokens of a block. Raises ConfigError where that is none, or more than `longest`."""
        length = usual if self.num_speculative_tokens is None else self.num_speculative_tokens
        if not 1 <= length <= (longest or length):
            most = f"1 to {longest}, the levels of its tree" if self.tree else f"1 to {longest}, a token of each head"
            raise ConfigError(f"num_speculative_tokens {length}: expected {most if longest else '1 or more'}")
        return length


@dataclass(frozen=True)
class OpenedDrafter:
    """A target with what drafts for it. Blocks have `length` tokens at first, of a tree levels."""

    model: PreTrainedModel
    drafter: Drafter | None
    length: int
    words: str


def find_drafter(name: str, root: Path) -> Path:
    """The export that `name` means: itself, a run, a version, or MODEL[@N] of the registry at `root` (its champion).

    Raises ArtifactError where there is none.
    """
    path = Path(name)
    return find_export(path if path.exists() else named_version(name, root, EXPORT_FILE))


def open_drafter(
    choice: DrafterChoice,
    target: Target,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    device_map: str | None = None,
) -> OpenedDrafter:
    """Load the target, and the drafter of `choice` for it; of Medusa-2 the target as that changes it.

    `device_map` spreads the target over devices as accelerate does.

    Raises ArtifactError where there is no such drafter, ConfigError where it belongs to another target or cannot draft
    as asked; both before the target's weights are loaded.
    """
    if choice.name is not None:
        export = find_drafter(choice.name, choice.root)
        record = read_record(export)
        check_made_for(record, target)
        if record.drafter_kind in HEAD_KINDS:
            return _open_heads(export, record, choice, target, dtype, device, device_map)
        return _open_draft_model(export, record, choice, target, dtype, device, device_map)
    if choice.tree:
        raise ConfigError("a draft tree is one of draft heads: name the drafter that it lies with")
    if choice.ngram:
        length = choice.length(_NGRAM_LENGTH)
        return OpenedDrafter(target.load_model(dtype, device, device_map), NgramDrafter(), length, "n-gram lookup")
    if choice.num_speculative_tokens is not None:
        raise ConfigError(f"num_speculative_tokens {choice.num_speculative_tokens}, but nothing drafts: name a drafter")
    return OpenedDrafter(target.load_model(dtype, device, device_map), None, 0, ALONE)


def _open_draft_model(
    export: Path,
    record: ExportRecord,
    choice: DrafterChoice,
    target: Target,
    dtype: torch.dtype,
    device: torch.device | str,
    device_map: str | None,
) -> OpenedDrafter:
    if choice.tree:
        raise ConfigError(f"{export}: a draft model has no draft tree, that is for heads; leave it out")
    length = choice.length(record.speculative_config["num_speculative_tokens"])
    drafter = DraftModelDrafter(*load_for_drafting(export, target, dtype, device))
    return OpenedDrafter(target.load_model(dtype, device, device_map), drafter, length, _WORDS[record.drafter_kind])


def _open_heads(
    export: Path,
    record: ExportRecord,
    choice: DrafterChoice,
    target: Target,
    dtype: torch.dtype,
    device: torch.device | str,
    device_map: str | None,
) -> OpenedDrafter:
    heads = load_heads(heads_file(export), target.identity.vocab_size)
    tree = draft_tree(export, heads.num_heads) if choice.tree else None
    if choice.tree and tree is None:
        raise ConfigError(
            f"{export}: no draft tree lies with these heads (medusa_choices in config.json); leave it out"
        )
    usual = tree.depth if tree else record.speculative_config["num_speculative_tokens"]
    length = choice.length(usual, tree.depth if tree else heads.num_heads)
    words = _WORDS[record.drafter_kind] + (f", tree of {tree.num_nodes}" if tree else "")
    if not record.lossless:
        target, words = adapted_target(target, export / ADAPTER_DIRECTORY), f"{words}, which change the target"
    model = target.load_model(dtype, device, device_map)
    return OpenedDrafter(model, HeadsDrafter(HeadsOnTarget(heads, TargetEnds.of(model)), tree), length, words)
