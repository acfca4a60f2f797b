"""Owns what engines read of Medusa heads: tensors by name and shape, keys of the configuration, words in a path.

Engines leave out what they do not know, and most serve what they did not find as it was initialised, without a word. So
what an engine would read is worked out here from the configuration, as its loader does, and any difference is an error.
Names are FasterDecoding's. Read in source: vLLM 0.32.0 (`models/medusa.py`, `configs/medusa.py`), TGI at db931fcf
(`layers/medusa.py`), FasterDecoding/Medusa at e2a5d20c (`medusa/model/medusa_model.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdist.config import MISREAD_IN_PATHS
from specdist.errors import ArtifactError, ConfigError

ENGINES = (VLLM, TGI, ORIGINAL) = ("vllm", "tgi", "original")

Shapes = dict[str, tuple[int, ...]]


def check_path(directory: Path) -> None:
    """Raise ConfigError where vLLM would take the drafter at `directory` for one of another kind, by its path."""
    path = str(directory.absolute())
    if found := [word for word in MISREAD_IN_PATHS if word in path.lower()]:
        raise ConfigError(f"{path}: vLLM misreads a path that contains {found}; choose another directory")


def _count(config: Mapping[str, Any], word: str, default: int) -> int:
    """As vLLM: any key with `num` and `word` in it is the number, and the last in the file wins."""
    return int([default, *(value for key, value in config.items() if "num" in key and word in key)][-1])


def _form(num_heads: int, num_layers: int, size: tuple[int, int], *, bias: bool, projections: int) -> Shapes:
    """Heads whose first `projections` have a projection of shape `size` [V, D]."""
    hidden = size[1]
    blocks = [f"{i}.{j}.linear" for i in range(num_heads) for j in range(num_layers)]
    shapes: Shapes = {f"{block}.weight": (hidden, hidden) for block in blocks}
    shapes |= {f"{block}.bias": (hidden,) for block in blocks if bias}
    return shapes | {f"{i}.{num_layers}.weight": size for i in range(projections)}


def _vllm(config: Mapping[str, Any]) -> Shapes:
    size = (config.get("vocab_size", 32001), config.get("hidden_size", 4096))
    if config.get("truncated_vocab_size", size[0]) != size[0]:
        raise ConfigError("truncated_vocab_size: vLLM 0.32 cannot read a reduced vocabulary; export all tokens")
    num_heads = _count(config, "heads", 5)
    return _form(
        num_heads,
        _count(config, "layers", 1),
        size,
        bias=config.get("medusa_fc_bias", False),
        projections=1 if config.get("original_lm_head") else num_heads,
    )


def _tgi(config: Mapping[str, Any], found: Shapes) -> Shapes:
    if "architectures" in config:
        raise ConfigError("architectures: with this key TGI builds no speculator; leave it out")
    if "medusa_num_heads" not in config or "medusa_num_layers" not in config:
        raise ConfigError("TGI takes heads by medusa_num_heads and medusa_num_layers: write both")
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    own = f"{num_heads - 1}.{num_layers}.weight" in found
    if not own and num_layers != 1:
        raise ConfigError(
            f"{num_layers} residual blocks without a projection per head: TGI reads one block; "
            "give every head a copy of the target's projection"
        )
    # Where heads share the target's projection, TGI knows the copy of it that vLLM needs, and passes over it
    projections = num_heads if own else int("0.1.weight" in found)
    return _form(
        num_heads, num_layers, (config["vocab_size"], config["hidden_size"]), bias=True, projections=projections
    )


def _original(config: Mapping[str, Any]) -> Shapes:
    num_heads, num_layers = config.get("medusa_num_heads", 4), config.get("medusa_num_layers", 1)
    if num_layers != 1:
        raise ConfigError(
            f"{num_layers} residual blocks per head: the original code makes them one module, and would keep the last "
            "alone; expected 1, serve these heads in vLLM or TGI"
        )
    size = (config["vocab_size"], config["hidden_size"])
    return _form(num_heads, num_layers, size, bias=True, projections=num_heads)


def check_readable(engine: str, config: Mapping[str, Any], found: Shapes) -> None:
    """Raise unless `engine`, told `config`, reads exactly the tensors `found`: none left out, none uninitialised.

    ArtifactError names tensors, ConfigError what the engine cannot read in this form.
    """
    if config.get("model_type") != "medusa":
        raise ConfigError(
            f"model_type {config.get('model_type')!r}: no engine serves these heads, they read 'medusa' alone; "
            "use our own decoder, or train Medusa heads"
        )
    if "token_map" in found:
        raise ConfigError("token_map: engines cannot read heads of a reduced vocabulary; export all tokens")
    read = {VLLM: lambda: _vllm(config), TGI: lambda: _tgi(config, found), ORIGINAL: lambda: _original(config)}[
        engine
    ]()
    faults = {
        "would not be read": sorted(found.keys() - read.keys()),
        "would stay uninitialised": sorted(read.keys() - found.keys()),
        "have another shape than is read": sorted(n for n in found.keys() & read.keys() if found[n] != read[n]),
    }
    if said := [f"tensors {names[:6]} {fault}" for fault, names in faults.items() if names]:
        raise ArtifactError(
            f"{engine} and these heads do not fit: {'; '.join(said)}. Expected {len(read)} tensors by the "
            "configuration's numbers of heads and blocks, medusa_fc_bias and original_lm_head; correct these, or "
            "export the heads again"
        )
