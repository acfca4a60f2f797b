"""Owns reading a causal LM from its directory: whole files, every tensor, ties as configured, or an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdist.errors import ArtifactError
from specdist.safetensors_file import read_header

_REMEDY = "download or save it again"


def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Which class of transformers runs such a model, None where it has none."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    found: type[PreTrainedModel] | None = kind[0] if isinstance(kind, tuple) else kind
    return found


def check_weights(directory: Path, config: PretrainedConfig) -> None:
    """Check, from headers alone where it can be, that the weights in `directory` are whole and as `config` says.

    Raises ArtifactError, naming the file, where there is none, where one is cut or padded, and where tensors that
    `config` calls tied are two different ones: some loaders keep both, others drop one.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{directory}: no *.safetensors; save the model with save_pretrained first")
    where = {name: file for file in files for name in read_header(file, _REMEDY)}
    for name, twin in _ties(config).items():
        if name in where and twin in where and not torch.equal(_read(where, name), _read(where, twin)):
            raise ArtifactError(
                f"{directory}: config.json says tie_word_embeddings, but {name} and {twin} differ, so engines and "
                "trainers would run two different models; set tie_word_embeddings to false, or delete the tensor that "
                "is not meant"
            )


def _ties(config: PretrainedConfig) -> Mapping[str, str]:
    """Which tensor stands for which other one, by their names in a file."""
    ties = getattr(causal_lm_class(config), "_tied_weights_keys", None)
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    return ties if tied and isinstance(ties, Mapping) else {}


def _read(where: Mapping[str, Path], name: str) -> Tensor:
    with safe_open(where[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def load_causal_lm(path: str | Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A causal LM in evaluation mode, from a directory or by its Hugging Face id. `options` go to `from_pretrained`.

    Raises ArtifactError where it cannot be read, and where its files lack a tensor, which would be random.
    """
    for file in sorted(Path(path).glob("*.safetensors")):
        read_header(file, _REMEDY)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{path}: no causal LM can be loaded from it ({error})") from error
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    if missing := sorted(info["missing_keys"]):
        raise ArtifactError(f"{path}: its files lack {len(missing)} tensors, such as {missing[:4]}; {_REMEDY}")
    return model.eval()
