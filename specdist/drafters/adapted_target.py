"""Owns a target that training changed (Medusa-2): the original with adapters merged, under an identity of its own."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist import provenance
from specdist.drafter_config import HeadsArguments
from specdist.drafters.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    add_target_adapters,
    load_adapter,
    merge_adapter,
)
from specdist.schema import TargetIdentity
from specdist.target import Target

ADAPTER_DIRECTORY = "adapter"  # in a checkpoint or an export of heads


@dataclass(frozen=True)
class AdaptedTarget(Target):
    """A target whose model has the adapters in the directory `adapter` merged into its weights."""

    adapter: Path

    def load_model(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", device_map: str | None = None
    ) -> PreTrainedModel:
        """As `Target.load_model`. Raises ArtifactError where the adapters do not fit, or a float32 merge is wrong."""
        model = load_adapter(super().load_model(dtype, device, device_map), self.adapter)
        # In half precision rounding alone differs by more than a broken merge does in float32
        merged: PreTrainedModel = merge_adapter(model) if dtype == torch.float32 else model.merge_and_unload()
        return merged.requires_grad_(False).eval()


def adapters_size(target: Target, arguments: HeadsArguments) -> int:
    """Number of parameters of the adapters that are asked for; loads no weights."""
    if not arguments.changes_target:
        return 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target.config)
        adapted = add_target_adapters(model, arguments, target.identity.model_id, seed=0)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def _identity(target: Target, adapter: Path) -> TargetIdentity:
    config = provenance.read_json(adapter / ADAPTER_CONFIG)
    parts = {
        "target": target.identity.weights_sha256,
        "adapters": provenance.sha256_file(adapter / ADAPTER_WEIGHTS),
        "scale": config["lora_alpha"] / config["r"],
    }
    return replace(target.identity, weights_sha256=provenance.sha256_json(parts))


def adapted_target(target: Target, adapter: Path) -> AdaptedTarget:
    """`target` as the adapters in the directory `adapter` change it. Its weights' hash is over both."""
    return AdaptedTarget(target.path, _identity(target, adapter), target.tokenizer, target.config, adapter)
