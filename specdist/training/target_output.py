"""Owns the target's side of a lesson: what turns its states into distributions, and the target itself where it runs.

Shapes: B rows, T tokens, S supervised positions of the batch, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.errors import ConfigError
from specdist.losses import Projection


def final_states(model: PreTrainedModel, batch: dict[str, Tensor], supervised: Tensor) -> Tensor:
    """Final states (after the norm) of a causal LM at the supervised positions of a batch: [S, D].

    `supervised`: a mask [B, T] of the positions whose states produced the supervised tokens, or their places [S] in all
    rows laid end to end.
    """
    inputs = {key: batch[key] for key in ("input_ids", "position_ids") if key in batch}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state  # [B, T, D]
    return hidden.flatten(0, 1)[supervised.flatten()]


@dataclass(frozen=True)
class TargetOutput:
    """The target's output projection, its token embeddings where heads see them, and the target itself where its states
    are not stored. It is frozen, and no part of what is trained."""

    projection: Projection
    model: PreTrainedModel | None = None
    embed: nn.Module | None = None

    @torch.no_grad()
    def states(self, batch: dict[str, Tensor], supervised: Tensor) -> Tensor:
        """The target's final states at the supervised positions of a batch, as `final_states`: [S, D]."""
        if "target_states" in batch:
            return batch["target_states"]
        if self.model is None:
            raise ConfigError("the batch holds no states of the target, and the target is not loaded")
        # In its own dtype: autocast, which is for what is trained, would cast at each of its layers
        with torch.autocast(supervised.device.type, enabled=False):
            return final_states(self.model, batch, supervised)
