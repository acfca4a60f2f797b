"""Owns the target's side of a lesson: what turns its states into distributions, and the target itself where it runs.

Shapes: B rows, T tokens, S supervised positions of the batch, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.errors import ConfigError
from specdist.losses import Projection
from specdist.target import backbone

MODEL_INPUTS = ("input_ids", "position_ids")
CPU_PASS_TOKENS = 1024  # of one pass of the target on a CPU: enough for its speed, and caches hold most of it


def final_states(model: PreTrainedModel, batch: dict[str, Tensor], supervised: Tensor) -> Tensor:
    """Final states (after the norm) of a causal LM at the supervised positions of a batch: [S, D].

    `supervised`: a mask [B, T] of the positions whose states produced the supervised tokens, or their places [S] in all
    rows laid end to end.
    """
    inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch}
    hidden = backbone(model)(**inputs, use_cache=False).last_hidden_state  # [B, T, D]
    return hidden.flatten(0, 1)[supervised.flatten()]


@dataclass(frozen=True)
class TargetOutput:
    """The target's output projection, its token embeddings where heads see them, and the target itself where its states
    are not stored. It is frozen, and no part of what is trained. `sharded`: processes call it equally often."""

    projection: Projection
    model: PreTrainedModel | None = None
    embed: nn.Module | None = None
    sharded: bool = False

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
