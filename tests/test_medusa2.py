"""Medusa-2: heads and adapters on the target learn by one loss, beside the original, and nothing else is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from safetensors.torch import load_file
from test_callbacks import Killed
from test_heads import LABELS, MIXTURE, ROWS, TARGET, VOCAB, make_heads
from torch import Tensor
from training_factory import sgd_settings
from transformers import TrainingArguments

from specdist.drafter_config import HeadsArguments
from specdist.drafters.adapter import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS, add_target_adapters
from specdist.errors import ArtifactError
from specdist.losses import FullTarget, Objective, position_losses
from specdist.target import output_projection
from specdist.training.callbacks import CheckpointAcceptance, run_training
from specdist.training.checkpoints import checkpoint_step
from specdist.training.heads import HeadsCollator
from specdist.training.medusa2 import HeadsAndTarget, Medusa2Trainer, medusa2_trainer
from specdist.training.target_output import TargetOutput

LORA = HeadsArguments(target_lora_rank=3, target_lora_alpha=6)
HEADS_RATE, TARGET_RATE, WEIGHT, DECAY = 1e-2, 3e-2, 2.5, 0.8


def make_joint(kind: str = "medusa", form: str = "shared", *, scale: float = 0.1) -> HeadsAndTarget:
    """Heads and adapters with values, so that every one of them has a gradient."""
    target = add_target_adapters(make_tiny_llama(VOCAB, seed=1), LORA, "tiny", seed=3)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in target.named_parameters():
        if ".lora_B." in name:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return HeadsAndTarget(make_heads(kind, form, scale=scale), target)


def make_trainer(
    joint: HeadsAndTarget, output: Path, *, objective: Objective = LABELS, packed: bool = False, **settings: Any
) -> Medusa2Trainer:
    adamw = {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "learning_rate": HEADS_RATE}
    arguments = sgd_settings(output, **({"per_device_train_batch_size": 4} | adamw | settings))
    model = joint.target.get_base_model()
    return medusa2_trainer(
        joint,
        HeadsCollator(Dataset.from_list(ROWS), 0, packed=packed),
        TrainingArguments(**arguments),
        objective=objective,
        target=TargetOutput(output_projection(model, model.config), None, model.get_input_embeddings()),
        decay=DECAY,
        target_learning_rate=TARGET_RATE,
        target_loss_weight=WEIGHT,
        pack_tokens=32 if packed else None,
    )


def plain_loss(joint: HeadsAndTarget, objective: Objective) -> Tensor:
    """The loss written plainly: token by token of each answer, first the target's own guess, then that of each head."""
    output, total = output_projection(TARGET, TARGET.config), torch.zeros(())
    weights = torch.tensor(list(objective.weights.values()))
    for r in ROWS:
        ids, first = torch.tensor(r["input_ids"]), r["prompt_length"]
        hidden = joint.target.get_base_model().model(input_ids=ids[None]).last_hidden_state[0]
        original = TARGET.model(input_ids=ids[None]).last_hidden_state[0]
        for u in range(first, len(ids)):  # token u, which the state at u − 1 produced
            said = FullTarget(original[u - 1 : u], output)
            own = position_losses(objective, output.of(hidden[u - 1 : u]), ids[u : u + 1], said, slice(None))
            total = total + WEIGHT * (weights @ own[:, 0])
            for i in range(min(joint.heads.num_heads, u - first)):
                t = u - 2 - i
                seen = TARGET.get_input_embeddings()(ids[t + 1 : t + 2 + i])[None]
                hydra = joint.heads.shape.kind == "hydra"
                features = joint.heads.features(i, hidden[t : t + 1], seen if hydra else None)
                logits = joint.heads.projection(i, output).of(features)
                terms = position_losses(objective, logits, ids[u : u + 1], said, slice(None))
                total = total + DECAY**i * (weights @ terms[:, 0])
    return total / sum(len(r["input_ids"]) - r["prompt_length"] for r in ROWS)


@pytest.mark.parametrize(
    ("kind", "form", "objective", "settings"),
    [
        ("medusa", "shared", LABELS, {}),
        ("medusa", "own", MIXTURE, {"packed": True}),
        ("hydra", "low_rank", MIXTURE, {"activation_checkpointing": True}),
        ("medusa", "shared", MIXTURE, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    ],
    ids=["labels", "packed", "hydra, recomputed", "accumulated"],
)
def test_t1_the_joint_step_is_that_of_the_loss_written_plainly(
    kind: str, form: str, objective: Objective, settings: dict[str, Any], tmp_path: Path
) -> None:
    joint, same = make_joint(kind, form), make_joint(kind, form)
    trainer = make_trainer(joint, tmp_path, objective=objective, optim="sgd", max_grad_norm=0.0, **settings)
    trainer.train()
    loss = plain_loss(same, objective)
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert {"target_loss", *(f"head_{i}_loss" for i in range(3))} <= logged.keys()
    trained = {name: p for name, p in same.named_parameters() if p.requires_grad}
    for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
        assert gradient.any(), name
        step = joint.get_parameter(name) - trained[name]
        rate = HEADS_RATE if name.startswith("heads.") else TARGET_RATE
        torch.testing.assert_close(step, -rate * gradient, atol=2e-6, rtol=1e-3, msg=name)
    assert {"heads." in name or ".lora_" in name for name in trained} == {True}
    for name, tensor in joint.target.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, same.target.state_dict()[name]), name


def test_heads_alone_do_not_keep_the_target_but_its_own_loss_does(tmp_path: Path) -> None:
    """What the target says, after the same steps with its own loss and without."""

    def divergence(weight: float) -> float:
        joint = make_joint(scale=0.0)
        trainer = make_trainer(joint, tmp_path / str(weight), objective=Objective({"forward_kl": 1.0}), max_steps=6)
        trainer.projection_weights[0] = weight
        trainer.train()
        batch = HeadsCollator(trainer.data_collator.examples, 0)([{"members": [0, 1, 2, 3]}])
        with torch.no_grad():
            changed, original = joint(batch, None)[0], joint.original_states(batch)
            p, q = (TARGET.lm_head(states).log_softmax(dim=-1) for states in (original, changed))
        return float((p.exp() * (p - q)).sum(dim=-1).mean())

    kept, left = divergence(20.0), divergence(0.0)
    assert kept < 0.5 * left


def saved(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "adapter" / ADAPTER_WEIGHTS)


def test_c10_a_checkpoint_holds_heads_and_adapters_alone_and_resuming_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    def train(name: str, kill_at: int | None = None, resume_from: Path | None = None) -> HeadsAndTarget:
        def measure(checkpoint: Path) -> dict[str, float]:
            if checkpoint_step(checkpoint) == kill_at:
                raise Killed
            return {}

        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2}
        joint = make_joint(scale=0.0)
        trainer = make_trainer(joint, tmp_path / name, objective=MIXTURE, lr_scheduler_type="cosine", **settings)
        run_training(trainer, resume_from=resume_from, callbacks=[CheckpointAcceptance(measure, dict)])
        return joint

    whole = train("whole")
    with pytest.raises(Killed):
        train("cut", kill_at=2)
    resumed = train("cut", resume_from=tmp_path / "cut" / "checkpoint-2")
    last = tmp_path / "whole" / "checkpoint-4"
    assert {p.name for p in last.rglob("*.safetensors")} == {"model.safetensors", ADAPTER_WEIGHTS}
    assert {p.name for p in (last / "adapter").iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_BASE}
    trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    tensors = saved(last)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in trained.values())
    assert len(tensors) == len(trained)
    for name, parameter in trained.items():
        assert torch.equal(resumed.get_parameter(name), parameter), name
    again = saved(tmp_path / "cut" / "checkpoint-4")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert any(not torch.equal(saved(tmp_path / "whole" / "checkpoint-2")[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("name", ["model.safetensors", f"adapter/{ADAPTER_WEIGHTS}"])
def test_c8_a_cut_file_of_a_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    joint = make_joint()
    joint.save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=f"{Path(name).name}.*cut"):
        joint.load(tmp_path)
