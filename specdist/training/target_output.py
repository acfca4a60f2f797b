"""Owns the target's side of a lesson: what turns its states into distributions, and the target itself where it runs.

Shapes: B rows, T tokens, S supervised positions of the batch, D hidden size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specdist.errors import ConfigError
from specdist.losses import Projection
from specdist.target import backbone

MODEL_INPUTS = ("input_ids", "position_ids")
CPU_PASS_TOKENS = 1024  # of one pass of the target on a CPU: enough for its speed, and caches hold most of it


def model_inputs(batch: dict[str, Tensor], config: PretrainedConfig) -> dict[str, Tensor]:
    """What a causal LM reads of a batch: [B, T] each.

    Padding is at the right, where causal attention never sees it, so no mask is needed. Flash attention keeps packed
    documents apart within a single row alone, so it gets all rows laid end to end: [1, B · T].
    """
    inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch}
    if "position_ids" in inputs and "flash" in str(config.get_text_config()._attn_implementation):
        return {key: tensor.reshape(1, -1) for key, tensor in inputs.items()}
    return inputs


def final_states(model: PreTrainedModel, batch: dict[str, Tensor], supervised: Tensor) -> Tensor:
    """Final states (after the norm) of a causal LM at the supervised positions of a batch: [S, D], on its device.

    `supervised`: a mask [B, T] of the positions whose states produced the supervised tokens, or their places [S] in all
    rows laid end to end.
    """
    inputs = model_inputs(batch, model.config)
    hidden = backbone(model)(**inputs, use_cache=False).last_hidden_state  # [B, T, D], where the last layer is
    return hidden.flatten(0, 1)[supervised.flatten().to(hidden.device)].to(supervised.device)


@dataclass(frozen=True)
class TargetOutput:
    """The target's output projection, its token embeddings where heads see them, and the target itself where its states
    are not stored. It is frozen, and no part of what is trained. `sharded`: processes call it equally often."""

    projection: Projection
    model: PreTrainedModel | None = None
    embed: nn.Module | None = None
    sharded: bool = False

    def on(self, device: torch.device) -> "TargetOutput":
        """With the projection on `device`, where batches are: a target over several devices has its own on the last."""
        weight, bias = self.projection.weight.to(device), self.projection.bias
        projection = replace(self.projection, weight=weight, bias=None if bias is None else bias.to(device))
        return replace(self, projection=projection)

    @torch.no_grad()
    def states(self, batch: dict[str, Tensor], supervised: Tensor) -> Tensor:
        """The target's final states at the supervised positions of a batch, as `final_states`: [S, D]."""
        if "target_states" in batch:
            return batch["target_states"]
        if self.model is None:
            raise ConfigError("the batch holds no states of the target, and the target is not loaded")
        num_rows, length = batch["input_ids"].shape
        places = supervised.flatten().nonzero()[:, 0] if supervised.dtype == torch.bool else supervised
        # In its own dtype: autocast, which is for what is trained, would cast at each of its layers
        with torch.autocast(supervised.device.type, enabled=False):
            if places.device.type != "cpu" or self.sharded:
                return final_states(self.model, batch, places)
            states, size = [], max(1, CPU_PASS_TOKENS // length)
            for start in range(0, num_rows, size):
                inside = places[(places >= start * length) & (places < (start + size) * length)] - start * length
                if len(inside):
                    needed = int((inside % length).max()) + 1  # what follows is seen by no state that is asked for
                    part = {key: batch[key][start : start + size, :needed] for key in MODEL_INPUTS if key in batch}
                    states.append(final_states(self.model, part, inside // length * needed + inside % length))
            return torch.cat(states) if states else final_states(self.model, batch, places)
