"""Owns the export of draft heads: Medusa in the one layout that vLLM, TGI and the original code share, Hydra beside it.

FasterDecoding tensor names in `medusa_lm_head.safetensors`. Where heads share the target's projection, `0.{L}.weight`
is a copy of it, which vLLM does not share with the target and would otherwise leave uninitialised without a word; a
low-rank difference is merged into a projection of each head's own. No `architectures` key (with one, TGI builds no
speculator) and no `lm_head.weight` (TGI refuses a name that the target has as well). No engine reads Hydra heads: they
keep our own names.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdist import provenance
from specdist.drafter_config import HYDRA, LOW_RANK, MEDUSA, SHARED
from specdist.drafters.adapted_target import ADAPTER_DIRECTORY
from specdist.drafters.adapter import ADAPTER_WEIGHTS
from specdist.drafters.heads import DraftHeads, HeadsShape
from specdist.drafters.heads_file import HEADS_FILE, heads_of
from specdist.errors import ArtifactError, ConfigError
from specdist.export.engines import VLLM, check_readable
from specdist.export.record import ExportRecord, check_read_back, write_record
from specdist.losses import Projection
from specdist.schema import TargetIdentity
from specdist.target import Target
from specdist.tree import DraftTree

CHANGED_TARGET = (
    f"not lossless: the engine must serve the target with {ADAPTER_DIRECTORY}/ merged into it, for example by PEFT: "
    f"PeftModel.from_pretrained(target, '{ADAPTER_DIRECTORY}').merge_and_unload().save_pretrained(path)"
)
_MERGED_TOLERANCE = 1e-5  # of the largest logit, fp32: what two orders of the same sums may differ by


def heads_config(
    shape: HeadsShape, target: TargetIdentity, dtype: torch.dtype, tree: DraftTree | None
) -> dict[str, object]:
    """What config.json says of heads: the keys that engines read."""
    config: dict[str, object] = {
        "model_type": shape.kind,
        f"{shape.kind}_num_heads": shape.num_heads,
        f"{shape.kind}_num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": target.vocab_size,
        "base_model_name_or_path": target.model_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if tree is not None:
        config["medusa_choices"] = [list(path) for path in tree.paths]
    if shape.kind == HYDRA:
        return config | {"projection": shape.projection}
    shared = {"version": "2", "original_lm_head": True} if shape.projection == SHARED else {"version": "1"}
    return config | shared | {"medusa_fc_bias": True}


def known_limits(shape: HeadsShape, tree: DraftTree | None, *, changes_target: bool = False) -> list[str]:
    """What heads in the shared layout cannot do where they serve."""
    limits = [CHANGED_TARGET] if changes_target else []
    if shape.kind == HYDRA:
        return [*limits, "no engine serves Hydra heads: they run in our own decoder alone"]
    limits.append(f"vLLM drafts a chain of the best token of each head: num_speculative_tokens 1 to {shape.num_heads}")
    if shape.projection == SHARED and (shape.num_layers != 1 or shape.num_heads < 2):
        limits.append("TGI reads this layout with one residual block per head and two heads or more")
    if tree is not None:
        limits.append(f"its tree of {tree.num_nodes} nodes (medusa_choices) serves in decoders that verify trees alone")
    return limits


def _merged(heads: DraftHeads, index: int, weight: Tensor) -> Tensor:
    """The projection of head `index` with its low-rank difference added to the target's `weight`: [V, D], fp32.

    Raises ArtifactError where logits of random states differ from those of the two parts.
    """
    down, up = (heads.get_parameter(f"{index}.{name}.weight").detach().float() for name in ("down", "up"))
    weight = weight.detach().to(up.device, torch.float32)
    merged = torch.addmm(weight, up, down)
    states = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(index)).to(up.device)
    apart = Projection(weight, update=up).of(torch.cat([states, states @ down.T], dim=-1))
    difference = (Projection(merged).of(states) - apart).abs().max() / apart.abs().max()
    if not difference <= _MERGED_TOLERANCE:
        raise ArtifactError(
            f"head {index}: merging its low-rank difference changes logits by {float(difference):.1e} of the largest, "
            f"expected at most {_MERGED_TOLERANCE:g}; its factors are not finite or far too large, train it again"
        )
    return merged


def _tensors(heads: DraftHeads, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the file holds, each tensor with memory of its own."""
    shape, tensors = heads.shape, dict(heads.state_dict())
    if shape.kind == MEDUSA and shape.projection == SHARED:
        tensors[f"0.{shape.num_layers}.weight"] = weight
    elif shape.kind == MEDUSA and shape.projection == LOW_RANK:
        for i in range(shape.num_heads):
            del tensors[f"{i}.down.weight"], tensors[f"{i}.up.weight"]
            tensors[f"{i}.{shape.num_layers}.weight"] = _merged(heads, i, weight).to("cpu", dtype)
    return {
        name: tensor.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def as_exported(heads: DraftHeads, output_projection: Tensor, dtype: torch.dtype) -> DraftHeads:
    """The heads that an export of `heads` in `dtype` holds, in fp32: rounded, a low-rank difference merged."""
    return heads_of(_tensors(heads, output_projection, dtype), heads.shape.vocab_size, "the heads to export")


def _size(adapter: Path | None) -> int:
    """Number of parameters of the target's adapters."""
    return 0 if adapter is None else sum(t.numel() for t in load_file(adapter / ADAPTER_WEIGHTS).values())


def _check(shape: HeadsShape, output_projection: Tensor, target: Target, num_speculative_tokens: int) -> None:
    if not 1 <= num_speculative_tokens <= shape.num_heads:
        raise ConfigError(
            f"num_speculative_tokens {num_speculative_tokens}: {shape.num_heads} heads draft 1 to {shape.num_heads}"
        )
    expected = (target.identity.vocab_size, shape.hidden_size)
    for found in (tuple(output_projection.shape), (shape.vocab_size, shape.hidden_size)):
        if found != expected:
            raise ConfigError(f"output projection {found}: expected {expected}; these heads belong to another target")


def write_heads(
    directory: Path,
    tensors: dict[str, Tensor],
    config: dict[str, object],
    record: ExportRecord,
    engine: str | None,
    adapter: Path | None = None,
) -> ExportRecord:
    """Write an export of heads for `engine` (None: for none), atomically; returns the completed record.

    `adapter`: the directory with the target's adapters, where heads were trained on a target that they change.

    Raises ArtifactError or ConfigError where the engine would not read all of it, ArtifactError on a failed read-back.
    """
    if engine is not None:
        check_readable(engine, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with provenance.atomic_directory(directory) as temporary:
        save_file(tensors, temporary / HEADS_FILE, metadata={"format": "pt"})
        provenance.write_json(temporary / "config.json", config)
        check_read_back(temporary, tensors)
        if adapter is not None:
            (temporary / ADAPTER_DIRECTORY).mkdir()
            for file in adapter.iterdir():
                shutil.copyfile(file, temporary / ADAPTER_DIRECTORY / file.name)  # not its mode
            if provenance.sha256_tree(temporary / ADAPTER_DIRECTORY) != provenance.sha256_tree(adapter):
                raise ArtifactError(f"{adapter}: changed while it was copied, or the disk is faulty; export again")
        return write_record(temporary, record)


def export_medusa(
    heads: DraftHeads,
    output_projection: Tensor,
    target: Target,
    directory: Path,
    *,
    dtype: torch.dtype,
    num_speculative_tokens: int,
    checkpoint_step: int,
    draft_tree: DraftTree | None = None,
    adapter: Path | None = None,
) -> ExportRecord:
    """Write `heads` in `dtype` to `directory`, atomically, with what engines need of `output_projection` [V, D].

    That is the target's weight. `draft_tree` is written to the configuration as `medusa_choices`. `adapter`: what
    changes the target (Medusa-2), a directory of PEFT's files, which becomes part of the export. Raises ConfigError
    where the draft length or the tree exceeds the heads or shapes do not fit, ArtifactError on a failed read-back.
    """
    shape = heads.shape
    _check(shape, output_projection, target, num_speculative_tokens)
    tree = None if draft_tree is None else DraftTree.of(draft_tree.paths, shape.num_heads)
    tensors = _tensors(heads, output_projection, dtype)
    copied = shape.kind == MEDUSA and shape.projection == SHARED
    record = ExportRecord(
        format=shape.kind,
        drafter_kind=shape.kind,
        target=target.identity,
        lossless=adapter is None,
        num_parameters=sum(t.numel() for t in tensors.values()) - copied * output_projection.numel() + _size(adapter),
        checkpoint_step=checkpoint_step,
        speculative_config={"method": shape.kind, "model": ".", "num_speculative_tokens": num_speculative_tokens},
        engines={"vllm": "0.32.0 (medusa)"} if shape.kind == MEDUSA else {},
        known_limits=known_limits(shape, tree, changes_target=adapter is not None),
    )
    engine = VLLM if shape.kind == MEDUSA else None
    config = heads_config(shape, target.identity, dtype, tree)
    return write_heads(directory, tensors, config, record, engine, adapter)
