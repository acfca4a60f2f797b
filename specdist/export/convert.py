"""Owns turning an export into the layout that one engine reads, and refusing where it would read only a part of it.

vllm: the shared layout (export/medusa.py), or a draft model as it is. tgi: the same, but heads of several blocks have
projections of their own. original: all heads have. Where there are none, they are copies of the target's, so that all
layouts give the same logits.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdist import provenance
from specdist.config import check_choice
from specdist.drafter_config import OWN, SHARED
from specdist.drafters.adapted_target import ADAPTER_DIRECTORY
from specdist.drafters.heads import HeadsShape
from specdist.drafters.heads_file import HEADS_FILE, heads_of
from specdist.errors import ArtifactError, ConfigError
from specdist.export.engines import ENGINES, ORIGINAL, TGI, VLLM, check_path, check_readable
from specdist.export.medusa import CHANGED_TARGET, heads_config, known_limits, write_heads
from specdist.export.record import EXPORT_FILE, ExportRecord, check_made_for, read_record, write_record
from specdist.target import Target
from specdist.tree import DraftTree

_READ_BY = {
    VLLM: "0.32.0 (medusa)",
    TGI: "db931fcf (Medusa; read in source, not run)",
    ORIGINAL: "FasterDecoding/Medusa e2a5d20c (read in source, not run)",
}
_LIMITS = {
    TGI: [
        "TGI finds the target by base_model_name_or_path in config.json: a Hugging Face id, or a path that it can open",
        "TGI drafts nothing in a pass of more than 128 tokens",
    ],
    ORIGINAL: [
        f'the original code opens a pickle, which is not shipped. To make it: python -c "import torch, '
        f"safetensors.torch as s; torch.save(s.load_file('{HEADS_FILE}'), 'medusa_lm_head.pt')\"",
        "medusa_model_legacy.py reads no projection of a head's own, so it drafts as measured only where heads share "
        "the target's",
    ],
}


def find_export(drafter: Path) -> Path:
    """The export in `drafter`: itself, a registry's version, or a run's directory. Raises ArtifactError."""
    for directory in (drafter, drafter / "export"):
        if (directory / EXPORT_FILE).is_file():
            return directory
    raise ArtifactError(
        f"{drafter}: no {EXPORT_FILE} there or in {drafter / 'export'}; "
        "expected an export, a version of a registry, or a run that has finished"
    )


def check_output(directory: Path) -> None:
    """Raise ConfigError where something lies at `directory` already: it is never written over."""
    if directory.exists():
        raise ConfigError(f"{directory}: exists already; choose a new directory, or remove it")


def _check_target(record: ExportRecord, target: Target, copy: Tensor | None) -> None:
    """Raise ConfigError unless the export was made for `target`, and a copy of its projection [V, D] still is one."""
    check_made_for(record, target)
    if copy is not None and not torch.equal(target.load_model(copy.dtype).get_output_embeddings().weight, copy):
        raise ConfigError(
            "the export's copy of the output projection is not the target's; export the heads from their run again"
        )


def _layout(engine: str, tensors: dict[str, Tensor], shape: HeadsShape) -> tuple[dict[str, Tensor], HeadsShape]:
    """The tensors that `engine` reads of heads in the shared layout, and what heads those are."""
    if engine == VLLM or shape.projection == OWN or (engine == TGI and shape.num_layers == 1):
        return tensors, shape
    copy = tensors[f"0.{shape.num_layers}.weight"]
    copies = {f"{i}.{shape.num_layers}.weight": copy.clone() for i in range(shape.num_heads)}
    return tensors | copies, replace(shape, projection=OWN)


def _convert_heads(
    source: Path, record: ExportRecord, output: Path, engine: str, target: Target | None, base_model: str | None
) -> ExportRecord:
    tensors, config = load_file(source / HEADS_FILE), provenance.read_json(source / "config.json")
    shape = heads_of(tensors, record.target.vocab_size, source / HEADS_FILE).shape
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_readable(VLLM, config, shapes)  # an export is in vLLM's layout
    if target is not None:
        copy = tensors[f"0.{shape.num_layers}.weight"] if shape.projection == SHARED else None
        _check_target(record, target, copy)
    paths = config.get("medusa_choices")
    tree = None if paths is None else DraftTree.of(paths, shape.num_heads)
    tensors, form = _layout(engine, tensors, shape)
    written = heads_config(form, record.target, tensors["0.0.linear.weight"].dtype, tree)
    if base_model is not None and engine != VLLM:  # vLLM is told the target when it starts
        written["base_model_name_or_path"] = base_model
    adapter = None if record.lossless else source / ADAPTER_DIRECTORY
    limits = _LIMITS[engine] if engine in _LIMITS else known_limits(form, tree)
    limits = limits if adapter is None else [CHANGED_TARGET, *limits]
    converted = replace(record, engines={engine: _READ_BY[engine]}, known_limits=limits)
    return write_heads(output, tensors, written, converted, engine, adapter)


def _copy_draft_model(source: Path, record: ExportRecord, output: Path, engine: str) -> ExportRecord:
    if engine != VLLM:
        raise ConfigError(f"format {engine} of a draft model: it reads Medusa heads alone; expected {VLLM}")
    with provenance.atomic_directory(output) as temporary:
        for name in record.files:
            shutil.copyfile(source / name, temporary / name)
        return write_record(temporary, record)


def convert(
    drafter: Path, output: Path, engine: str, *, target: Target | None = None, base_model: str | None = None
) -> ExportRecord:
    """Write the export in `drafter` (`find_export`) to `output` as `engine` reads it: vllm, tgi or original.

    `target` is compared with the export's; `base_model` is how the engine finds it. Raises ConfigError or
    ArtifactError, and writes nothing, where the engine would leave out a tensor or serve one uninitialised.
    """
    check_choice("format", engine, ENGINES)
    check_output(output)
    if engine == VLLM:
        check_path(output)
    source = find_export(drafter)
    record = read_record(source)
    if record.drafter_kind == "draft_model":
        return _copy_draft_model(source, record, output, engine)
    return _convert_heads(source, record, output, engine, target, base_model)
