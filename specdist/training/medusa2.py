"""Owns training draft heads and adapters on the target together (Medusa-2, Cai et al. 2024, section 2.2.2).

Shapes: B rows, T tokens, S supervised tokens of a batch in row order, H heads, D hidden size.

Beside the heads' losses stands the target's own, on the very tokens it would write, so that it keeps saying them: by
the same objective, as if it were one more head, which predicts row u from row u. Divergences compare both with the
original target, which is the same model with its adapters off.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from specdist.drafter_config import HYDRA
from specdist.drafters.adapted_target import ADAPTER_DIRECTORY
from specdist.drafters.adapter import Adapted, read_adapters
from specdist.drafters.heads import DraftHeads
from specdist.drafters.heads_file import CHECKPOINT_FILE, load_heads
from specdist.losses import FullTarget, Objective, TargetDistributions
from specdist.training.arguments import settle_arguments
from specdist.training.batches import schedule
from specdist.training.heads import HeadsCollator, ProjectionsTrainer, following_embeddings, head_rows, head_weights
from specdist.training.target_output import TargetOutput, final_states


class HeadsAndTarget(nn.Module):
    """Heads and the target with adapters, in one module, so that DDP sees all that is trained and nothing else."""

    def __init__(self, heads: DraftHeads, target: Adapted) -> None:
        super().__init__()
        self.heads, self.target = heads, target
        self.recomputes = False

    @property
    def model(self) -> PreTrainedModel:
        """The target's causal LM, which runs with the adapters unless they are switched off."""
        return cast(PreTrainedModel, self.target.get_base_model())

    def train(self, mode: bool = True) -> "HeadsAndTarget":
        """The target stays as it serves, without dropout; only recomputing activations needs its training mode."""
        super().train(mode)
        self.target.train(mode and self.recomputes)
        return self

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the activations of the target's layers in the backward pass; called by the trainer."""
        self.recomputes = True
        self.model.activation_checkpointing_enable(**options)

    def forward(self, batch: dict[str, Tensor], embeddings: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The target's states [S, D] at the places of `batch`, and of each head what its projection reads, in fp32."""
        states = final_states(self.model, batch, batch["positions"]).float()
        return states, self.heads(states, embeddings)

    @torch.no_grad()
    def original_states(self, batch: dict[str, Tensor]) -> Tensor:
        """The states of the target as it was before training: [S, D]."""
        places = batch["positions"]
        with self.target.disable_adapter(), torch.autocast(places.device.type, enabled=False):  # as TargetOutput.states
            return final_states(self.model, batch, places)

    def save(self, directory: Path) -> None:
        """Write what is trained and nothing else: the heads, and the adapters beside them."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.heads.state_dict(), directory / CHECKPOINT_FILE, metadata={"format": "pt"})
        self.target.save_pretrained(str(directory / ADAPTER_DIRECTORY))

    def load(self, directory: Path) -> None:
        """Read what `save` wrote. Raises ArtifactError where a file is cut, or the adapters are of another target."""
        heads = load_heads(directory / CHECKPOINT_FILE, self.heads.shape.vocab_size)
        self.heads.load_state_dict(heads.state_dict())
        read_adapters(self.target, directory / ADAPTER_DIRECTORY)


class Medusa2Trainer(ProjectionsTrainer):
    """Trains heads and adapters, each at a learning rate of its own. Checkpoints hold no tensor of the target."""

    def __init__(
        self,
        joint: HeadsAndTarget,
        *,
        objective: Objective,
        target: TargetOutput,
        decay: float,
        target_learning_rate: float,
        target_loss_weight: float,
        **arguments: Any,
    ) -> None:
        weights = {"target": target_loss_weight} | head_weights(joint.heads.num_heads, decay)
        super().__init__(objective, weights, model=joint, **arguments)
        self.joint, self.output = joint, target
        self.target_learning_rate = target_learning_rate

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The trainer's own, its groups split in two: the adapters at `target_learning_rate`, the heads as asked."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        adapters = {id(parameter) for parameter in self.joint.target.parameters()}
        for group in list(optimizer.param_groups):
            members = group["params"]
            group["params"] = [p for p in members if id(p) not in adapters]
            if mine := [p for p in members if id(p) in adapters]:
                optimizer.add_param_group(group | {"params": mine, "lr": self.target_learning_rate})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """w · the target's objective + Σ over heads of decay^i times theirs, over the supervised tokens of all
        processes and accumulation steps: the loss of Cai et al. 2024, section 2.2.2, divided by its λ0 = 1 / w."""
        tokens, shape, projection = inputs["labels"], self.joint.heads.shape, self.output.projection
        labels, rows = head_rows(tokens, inputs["completion_index"], shape.num_heads)  # [H, S] each
        labels = torch.cat([tokens[None], labels])  # [1 + H, S], the target first
        distributions: TargetDistributions | None = None
        if self.objective.needs_target:
            distributions = FullTarget(self.joint.original_states(inputs), projection)
        hydra = shape.kind == HYDRA
        embeddings = following_embeddings(self.output.embed, tokens, shape.num_heads) if hydra else None
        states, features = model(inputs, embeddings)  # [S, D], H times [S, D]
        features = [states, *self.at_rows(features, rows)]
        projections = [projection, *(self.joint.heads.projection(i, projection) for i in range(shape.num_heads))]
        return self.mean_loss(features, projections, labels, distributions, num_items_in_batch)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            self.joint.save(Path(output_dir or str(self.args.output_dir)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.joint.load(Path(resume_from_checkpoint))


def medusa2_trainer(
    joint: HeadsAndTarget,
    collator: HeadsCollator,
    arguments: TrainingArguments,
    *,
    objective: Objective,
    target: TargetOutput,
    decay: float,
    target_learning_rate: float,
    target_loss_weight: float,
    pack_tokens: int | None = None,
) -> Medusa2Trainer:
    """A trainer over the examples of `collator`, which brings no states: the target runs at every step.

    `target` are the ends of the model in `joint`. Head i weighs decay^i, the target's own loss `target_loss_weight`.
    `pack_tokens`: for a packed collator, the most tokens that share a row.
    """
    settle_arguments(arguments)
    arguments.ddp_find_unused_parameters = False  # every parameter gets a gradient at every step (heads.py)
    return Medusa2Trainer(
        joint,
        objective=objective,
        target=target,
        decay=decay,
        target_learning_rate=target_learning_rate,
        target_loss_weight=target_loss_weight,
        args=arguments,
        train_dataset=schedule(
            collator.examples, pack_tokens, multiple_of=arguments.train_batch_size * arguments.world_size
        ),
        data_collator=collator,
    )
