"""Started by test_heads.py in one process or two: steps of Hydra heads on uneven rows, then of heads and target.

python tests/heads_in_processes.py OUTPUT BATCH whole|sharded
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import make_tiny_llama
from datasets import Dataset
from test_heads import MIXTURE, VOCAB, make_heads, row
from test_medusa2 import make_joint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_factory import sgd_settings
from transformers import Trainer, TrainingArguments

from specdist.target import output_projection, shard_layers
from specdist.training.heads import HeadsCollator, heads_trainer
from specdist.training.medusa2 import medusa2_trainer
from specdist.training.target_output import TargetOutput

ROWS = [row(4, 13, 0), row(11, 14, 1), row(2, 22, 2), row(7, 8, 3), row(5, 10, 4), row(3, 17, 5), row(9, 11, 6)]


def train(trainer: Trainer, output: Path) -> None:
    """Train, and save the model with its losses."""
    trainer.train()
    trainer.save_model(str(output))
    if trainer.accelerator.is_main_process:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        torch.save({"losses": losses, "processes": trainer.accelerator.num_processes}, output / "result.pt")


def main() -> None:
    output, batch, sharded = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "sharded"
    settings = sgd_settings(
        output.parent / "trainer", per_device_train_batch_size=batch, max_steps=4, learning_rate=0.1
    )
    arguments = TrainingArguments(**settings)  # joins the process group
    target = make_tiny_llama(VOCAB, seed=1).requires_grad_(False)
    if sharded:
        shard_layers(target, init_device_mesh("cpu", (dist.get_world_size(),)))
        assert all(isinstance(p, DTensor) for p in target.model.layers.parameters())
    trainer = heads_trainer(
        make_heads("hydra", "own", scale=0.1),
        HeadsCollator(Dataset.from_list(ROWS), 0),
        arguments,
        objective=MIXTURE,
        target=TargetOutput(
            output_projection(target, target.config), target, target.get_input_embeddings(), sharded=sharded
        ),
        decay=0.8,
    )
    train(trainer, output)
    joint = make_joint("hydra", "own")
    model = joint.model
    together = medusa2_trainer(
        joint,
        HeadsCollator(Dataset.from_list(ROWS), 0),
        TrainingArguments(**settings),
        objective=MIXTURE,
        target=TargetOutput(output_projection(model, model.config), None, model.get_input_embeddings()),
        decay=0.8,
        target_learning_rate=0.01,
        target_loss_weight=1.0,
    )
    train(together, output / "together")
    if dist.is_initialized():
        dist.destroy_process_group()  # left to the interpreter, its threads at times abort the process as it ends


if __name__ == "__main__":
    main()
