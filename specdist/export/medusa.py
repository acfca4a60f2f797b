"""Owns the export of Medusa heads: the one layout that vLLM, TGI and the original code share.

FasterDecoding tensor names in `medusa_lm_head.safetensors`; `0.{L}.weight` is a copy of the target's output projection,
which vLLM does not share with the target and would otherwise leave uninitialised without a word. No `architectures` key
(with one, TGI builds no speculator) and no `lm_head.weight` (TGI refuses a name that the target has as well).
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdist import provenance
from specdist.drafters.heads import HEADS_FILE, MedusaHeads
from specdist.errors import ConfigError
from specdist.export.record import ExportRecord, check_read_back, write_record
from specdist.target import Target


def speculative_config(model: str, num_speculative_tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config` for Medusa heads at path `model`."""
    return {"method": "medusa", "model": model, "num_speculative_tokens": num_speculative_tokens}


def _config(heads: MedusaHeads, target: Target, dtype: torch.dtype) -> dict[str, object]:
    return {
        "model_type": "medusa",
        "version": "2",
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "hidden_size": heads.hidden_size,
        "vocab_size": target.identity.vocab_size,
        "base_model_name_or_path": target.identity.model_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _limits(heads: MedusaHeads) -> list[str]:
    limits = [f"vLLM drafts a chain of the best token of each head: num_speculative_tokens 1 to {heads.num_heads}"]
    if heads.num_layers != 1 or heads.num_heads < 2:
        limits.append("TGI reads this layout with one residual block per head and two heads or more")
    return limits


def export_medusa(
    heads: MedusaHeads,
    output_projection: Tensor,
    target: Target,
    directory: Path,
    *,
    dtype: torch.dtype,
    num_speculative_tokens: int,
    checkpoint_step: int,
) -> ExportRecord:
    """Write `heads` and a copy of the target's `output_projection` [V, D] in `dtype` to `directory`, atomically.

    Raises ConfigError where the draft length exceeds the heads or shapes do not fit, ArtifactError on a failed
    read-back.
    """
    if not 1 <= num_speculative_tokens <= heads.num_heads:
        raise ConfigError(
            f"num_speculative_tokens {num_speculative_tokens}: {heads.num_heads} heads draft 1 to {heads.num_heads}"
        )
    if tuple(output_projection.shape) != (target.identity.vocab_size, heads.hidden_size):
        raise ConfigError(
            f"output projection {tuple(output_projection.shape)}: expected "
            f"({target.identity.vocab_size}, {heads.hidden_size}); these heads belong to another target"
        )
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in heads.state_dict().items()}
    tensors[f"0.{heads.num_layers}.weight"] = output_projection.detach().to("cpu", dtype).clone()
    with provenance.atomic_directory(directory) as temporary:
        save_file(tensors, temporary / HEADS_FILE, metadata={"format": "pt"})
        provenance.write_json(temporary / "config.json", _config(heads, target, dtype))
        check_read_back(temporary, tensors)
        return write_record(
            temporary,
            ExportRecord(
                format="medusa",
                drafter_kind="medusa",
                target=target.identity,
                lossless=True,
                num_parameters=sum(p.numel() for p in heads.parameters()),
                checkpoint_step=checkpoint_step,
                speculative_config=speculative_config(".", num_speculative_tokens),
                engines={"vllm": "0.32.0 (medusa)"},
                known_limits=_limits(heads),
            ),
        )
