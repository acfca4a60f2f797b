"""Draft heads: what each head must predict, what is trained, and means that do not depend on how a batch is cut."""

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_factory import sgd_settings
from transformers import TrainingArguments
from warm_process import run_ranks, run_script

from specdist.dataset.features import target_states
from specdist.drafters.heads import DraftHeads, HeadsOnTarget, HeadsShape, TargetEnds
from specdist.drafters.heads_file import HEADS_FILE, heads_of, load_heads
from specdist.errors import ArtifactError
from specdist.losses import IGNORED, FullTarget, Objective, position_losses
from specdist.objective import CROSS_ENTROPY
from specdist.schema_heads import TOP
from specdist.target import output_projection
from specdist.training import target_output
from specdist.training.heads import HeadsCollator, HeadsTrainer, head_rows, heads_trainer
from specdist.training.target_output import TargetOutput

VOCAB = 40
TARGET = make_tiny_llama(VOCAB, seed=1).requires_grad_(False)
WIDTH = TARGET.config.hidden_size
FORMS = [(kind, form) for kind in ("medusa", "hydra") for form in ("shared", "own", "low_rank")]
LABELS = Objective({CROSS_ENTROPY: 1.0})
MIXTURE = Objective({"negative_log_acceptance": 1.0, "forward_kl": 0.5}, temperature=0.7)


def row(prompt_length: int, length: int, seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {
        "input_ids": ids,
        "labels": [IGNORED] * prompt_length + ids[prompt_length:],
        "prompt_length": prompt_length,
    }


ROWS = [row(3, 5 + 4 * seed, seed) for seed in range(4)]  # unequal lengths: a mean of means would differ


def make_heads(kind: str = "medusa", form: str = "shared", *, num_heads: int = 3, scale: float = 0.0) -> DraftHeads:
    heads = DraftHeads(HeadsShape(num_heads, 2, WIDTH, VOCAB, kind, form, 4 if form == "low_rank" else 0))
    heads.copy_projection(TARGET.get_output_embeddings().weight)
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return heads


def items(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"members": [i], "length": len(r["input_ids"])} for i, r in enumerate(rows)]


def collated(rows: list[dict[str, Any]], packed: bool) -> dict[str, Tensor]:
    return HeadsCollator(Dataset.from_list(rows), 0, packed=packed)(items(rows))


def test_t1_t3_head_i_predicts_token_t_plus_2_plus_i_and_never_past_the_end() -> None:
    labels, rows = head_rows(torch.tensor([11, 12, 13, 14, 15]), torch.arange(5), 3)
    assert labels.tolist() == [
        [IGNORED, 12, 13, 14, 15],
        [IGNORED, IGNORED, 13, 14, 15],
        [IGNORED, IGNORED, IGNORED, 14, 15],
    ]
    # the state of row t produced the t-th token, so head i reads it to predict the token 1 + i further on
    for i in range(3):
        assert rows[i, 1 + i :].tolist() == list(range(4 - i))


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_state_is_that_of_the_prompts_last_token(packed: bool) -> None:
    rows = [row(2, 5, 0), row(4, 8, 1)]
    batch = collated(rows, packed)
    assert batch["labels"].tolist() == rows[0]["input_ids"][2:] + rows[1]["input_ids"][4:]
    assert batch["completion_index"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    laid = batch["input_ids"].flatten()

    assert laid[batch["positions"]].tolist() == rows[0]["input_ids"][1:4] + rows[1]["input_ids"][3:7]


@pytest.mark.parametrize("packed", [False, True])
def test_states_of_a_batch_are_those_of_each_document_alone(packed: bool) -> None:
    output = TargetOutput(output_projection(TARGET, TARGET.config), TARGET)
    batch = collated(ROWS, packed)
    together = output.states(batch, batch["positions"])
    alone = [collated([r], False) for r in ROWS]
    torch.testing.assert_close(together, torch.cat([output.states(b, b["positions"]) for b in alone]))


def test_a_cpu_takes_the_target_over_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass ends with the last state that is asked for; by mask or by places, the states are those of one pass."""
    batch, output = collated(ROWS, False), TargetOutput(output_projection(TARGET, TARGET.config), TARGET)
    places, (num_rows, length) = batch["positions"], batch["input_ids"].shape
    whole = replace(output, sharded=True).states(batch, places)
    mask = torch.zeros(num_rows * length, dtype=torch.bool).index_fill(0, places, True).view(num_rows, length)
    seen: list[tuple[int, ...]] = []
    forward = TARGET.base_model.forward
    monkeypatch.setattr(
        TARGET.base_model, "forward", lambda **inputs: seen.append(inputs["input_ids"].shape) or forward(**inputs)
    )
    monkeypatch.setattr(target_output, "CPU_PASS_TOKENS", 2 * length)
    for supervised in (places, mask):
        torch.testing.assert_close(output.states(batch, supervised), whole)
    ends = [len(r["input_ids"]) - 1 for r in ROWS]  # the last token's own state predicts nothing
    assert seen == 2 * [(len(pair), max(pair)) for pair in (ends[i : i + 2] for i in range(0, num_rows, 2))]


def test_m13_no_label_of_any_head_crosses_into_another_row() -> None:
    batch = collated(ROWS, True)
    labels, rows = head_rows(batch["labels"], batch["completion_index"], 3)
    document = torch.cat([torch.full((len(r["input_ids"]) - 3,), i) for i, r in enumerate(ROWS)])
    for i in range(3):
        at = labels[i] != IGNORED
        assert torch.equal(document[rows[i][at]], document[at])
        assert at.sum() == sum(max(0, len(r["input_ids"]) - 3 - 1 - i) for r in ROWS)


@pytest.mark.parametrize("answer", [0, 1])
def test_an_answer_too_short_for_any_head_has_no_label(answer: int) -> None:
    labels, _ = head_rows(torch.full((answer,), 5), torch.arange(answer), 2)
    assert (labels == IGNORED).all()


def test_parameters_grow_with_layers_and_each_block_is_its_own() -> None:
    one, three = (DraftHeads(HeadsShape(2, layers, 16, VOCAB)) for layers in (1, 3))
    assert sum(p.numel() for p in three.parameters()) == 3 * sum(p.numel() for p in one.parameters())
    assert len({p.data_ptr() for p in three.parameters()}) == 2 * 3 * 2
    assert set(one.state_dict()) == {f"{i}.0.linear.{kind}" for i in range(2) for kind in ("weight", "bias")}


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_untrained_heads_repeat_the_targets_next_token(kind: str, form: str) -> None:
    heads = HeadsOnTarget(make_heads(kind, form), TargetEnds.of(TARGET))
    hidden, path = torch.randn(5, WIDTH), torch.randint(0, VOCAB, (5, 3))
    for i in range(3):
        torch.testing.assert_close(heads.logits(i, hidden, path), TARGET.get_output_embeddings()(hidden))


def test_the_ends_of_a_target_do_not_hold_its_layers() -> None:
    target = make_tiny_llama(VOCAB)
    layer, ends = weakref.ref(target.model.layers[0]), TargetEnds.of(target)
    del target
    gc.collect()
    assert layer() is None
    assert len(ends.projection.weight) == VOCAB


@pytest.mark.parametrize("form", ["shared", "own", "low_rank"])
def test_heads_asked_all_at_once_answer_as_one_by_one(form: str) -> None:
    heads = HeadsOnTarget(make_heads("medusa", form, scale=0.3), TargetEnds.of(TARGET))
    hidden, path = torch.randn(5, WIDTH), torch.zeros(5, 3, dtype=torch.long)
    ahead = heads.logits_ahead(hidden, 2)
    torch.testing.assert_close(ahead, torch.stack([heads.logits(i, hidden, path) for i in range(2)]))


def test_hydra_heads_cannot_be_asked_before_anything_is_drafted() -> None:
    heads = HeadsOnTarget(make_heads("hydra"), TargetEnds.of(TARGET))
    with pytest.raises(ValueError, match="see what was drafted"):
        heads.logits_ahead(torch.randn(1, WIDTH), 2)


def test_a_hydra_head_sees_the_tokens_before_its_own_and_no_others() -> None:
    heads = HeadsOnTarget(make_heads("hydra", scale=0.3), TargetEnds.of(TARGET))
    hidden, path = torch.randn(1, WIDTH), torch.tensor([[1, 2, 3]])
    for i in range(3):
        base = heads.logits(i, hidden, path)
        for place in range(3):
            other = path.clone()
            other[0, place] += 7
            assert torch.equal(heads.logits(i, hidden, other), base) == (place > i)


def train_once(
    tmp_path: Path,
    *,
    batch: int,
    accumulation: int,
    rows: list[dict[str, Any]],
    heads: DraftHeads | None = None,
    objective: Objective = LABELS,
    bf16: bool = False,
    packed: bool = False,
    cached: bool = False,
) -> tuple[HeadsTrainer, DraftHeads]:
    heads = heads or make_heads()
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "bf16": bf16}
    arguments = TrainingArguments(**sgd_settings(tmp_path, **settings))
    examples = Dataset.from_list(rows)
    states = target_states(tmp_path / "states", examples, lambda: TARGET) if cached else None
    before = {name: tensor.clone() for name, tensor in TARGET.state_dict().items()}
    projection = output_projection(TARGET, TARGET.config)
    trainer = heads_trainer(
        heads,
        HeadsCollator(examples, 0, packed=packed, states=states),
        arguments,
        objective=objective,
        target=TargetOutput(projection, None if cached else TARGET, TARGET.get_input_embeddings()),
        decay=0.8,
        pack_tokens=32 if packed else None,
    )
    trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in TARGET.state_dict().items())
    return trainer, heads


def plain_loss(
    heads: DraftHeads, rows: list[dict[str, Any]], objective: Objective
) -> tuple[Tensor, dict[str, list[bool]]]:
    """The loss written plainly: document by document, head by head, at every position of its answer.

    With it, by head and k, whether the label was among the k best tokens.
    """
    target, total = output_projection(TARGET, TARGET.config), torch.zeros(())
    hits: dict[str, list[bool]] = {}
    for r in rows:
        ids, prompt = torch.tensor(r["input_ids"]), r["prompt_length"]
        hidden = TARGET.base_model(input_ids=ids[None]).last_hidden_state[0]
        for i in range(heads.num_heads):
            for t in range(prompt - 1, len(ids) - 2 - i):  # token t + 2 + i is in the answer, and exists
                seen = TARGET.get_input_embeddings()(ids[t + 1 : t + 2 + i])[None]
                features = heads.features(i, hidden[t : t + 1], seen if heads.shape.kind == "hydra" else None)
                logits = heads.projection(i, target).of(features)
                distribution = FullTarget(hidden[t + 1 + i : t + 2 + i], target)
                terms = position_losses(objective, logits, ids[t + 2 + i : t + 3 + i], distribution, slice(None))
                weights = torch.tensor(list(objective.weights.values()))
                total = total + 0.8**i * (weights @ terms[:, 0])
                for k in TOP:
                    best = logits[0].topk(k).indices.tolist()
                    hits.setdefault(f"head_{i}_top{k}", []).append(int(ids[t + 2 + i]) in best)
    return total / sum(len(r["input_ids"]) - r["prompt_length"] for r in rows), hits


@pytest.mark.parametrize("objective", [LABELS, MIXTURE], ids=["labels", "distribution"])
@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_t1_loss_and_step_are_those_of_the_loss_written_plainly(
    kind: str, form: str, objective: Objective, tmp_path: Path
) -> None:
    heads, same = make_heads(kind, form, scale=0.1), make_heads(kind, form, scale=0.1)
    trainer, _ = train_once(tmp_path, batch=4, accumulation=1, rows=ROWS, heads=heads, objective=objective)
    loss, hits = plain_loss(same, ROWS, objective)
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert {name: logged[name] for name in hits} == {name: round(sum(h) / len(h), 4) for name, h in hits.items()}
    parameters = dict(same.named_parameters())
    for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        step = heads.get_parameter(name) - parameters[name]
        torch.testing.assert_close(step, -1e-2 * gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_t3_t12_every_head_learns_the_optimizer_holds_only_heads_and_the_target_stays(tmp_path: Path) -> None:
    trainer, heads = train_once(tmp_path, batch=4, accumulation=1, rows=[row(3, 12, seed) for seed in range(4)])
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in heads.parameters()}
    assert all(parameter.abs().sum() > 0 for parameter in heads.parameters())
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {f"head_{i}_loss" for i in range(3)} <= logged.keys()


@pytest.mark.parametrize(
    "change",
    [{"batch": 1, "accumulation": 4}, {"batch": 2, "accumulation": 2}, {"packed": True}, {"cached": True}],
    ids=["1x4", "2x2", "packed", "cached"],
)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_t9_the_step_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    one, other = make_heads(kind, scale=0.1), make_heads(kind, scale=0.1)
    common = {"batch": 4, "accumulation": 1, "rows": ROWS, "objective": MIXTURE}
    whole, _ = train_once(tmp_path / "whole", heads=one, **common)
    parts, _ = train_once(tmp_path / "parts", heads=other, **(common | change))
    torch.testing.assert_close(
        torch.nn.utils.parameters_to_vector(one.parameters()),
        torch.nn.utils.parameters_to_vector(other.parameters()),
        atol=1e-6,
        rtol=1e-4,
    )
    losses = [next(e["loss"] for e in t.state.log_history if "loss" in e) for t in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_vocabulary_product_runs_in_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def losses(*arguments: Any, compute: Any = position_losses) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return compute(*arguments)

    monkeypatch.setattr("specdist.fused_losses.position_losses", losses)
    train_once(tmp_path, batch=2, accumulation=1, rows=[row(3, 12, seed) for seed in range(2)], bf16=True)
    assert seen == [True] * 3  # the trainer's own autocast covers the heads' forward alone


def test_t4_a_batch_without_any_label_is_no_nan(tmp_path: Path) -> None:
    _, heads = train_once(tmp_path, batch=2, accumulation=1, rows=[row(5, 6, seed) for seed in range(2)])
    assert all(torch.isfinite(parameter).all() for parameter in heads.parameters())


@pytest.mark.parametrize("cached", [False, True])
def test_a_batch_of_items_without_members_is_no_nan(tmp_path: Path, cached: bool) -> None:
    rows = [row(3, 9, 1)]
    _, alone = train_once(tmp_path / "1", batch=1, accumulation=1, rows=rows, cached=cached)
    _, filled = train_once(tmp_path / "2", batch=1, accumulation=4, rows=rows, cached=cached)
    for one, other in zip(alone.parameters(), filled.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_heads_are_read_back_as_what_they_are(tmp_path: Path, kind: str, form: str) -> None:
    heads = make_heads(kind, form, scale=0.2)
    save_file(heads.state_dict(), tmp_path / HEADS_FILE)
    again = load_heads(tmp_path / HEADS_FILE, VOCAB)
    assert again.shape == heads.shape
    assert all(torch.equal(tensor, heads.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert all(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("damage", ["missing", "renamed", "shape"])
def test_x1_incomplete_heads_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    tensors = dict(DraftHeads(HeadsShape(2, 1, 8, VOCAB)).state_dict())
    if damage == "missing":
        del tensors["1.0.linear.bias"]
    elif damage == "renamed":
        tensors["1.0.fc.bias"] = tensors.pop("1.0.linear.bias")
    else:
        tensors["1.0.linear.bias"] = torch.zeros(7)
    with pytest.raises(ArtifactError, match=r"1\.0\."):
        heads_of(tensors, VOCAB, "the file")


def test_t10_c10_two_processes_and_a_sharded_target_give_the_heads_of_one(tmp_path: Path) -> None:
    results, saved, together = {}, {}, {}
    for name, batch in (("whole", 4), ("sharded", 2)):
        output = tmp_path / name / "heads"
        script = [str(Path(__file__).with_name("heads_in_processes.py")), str(output), str(batch), name]
        done = [run_script(script, os.environ)] if name == "whole" else run_ranks(script, 2)
        assert not any(process.returncode for process in done), [process.stderr for process in done]
        results[name] = torch.load(output / "result.pt")
        saved[name] = load_heads(output / "model.safetensors", VOCAB)
        joint = output / "together"  # Medusa-2, whose target is whole on each process
        files = (joint / "model.safetensors", joint / "adapter" / "adapter_model.safetensors")
        together[name] = torch.load(joint / "result.pt")["losses"], load_file(files[0]) | load_file(files[1])
    assert [results[name]["processes"] for name in saved] == [1, 2]
    assert results["sharded"]["losses"] == pytest.approx(results["whole"]["losses"], rel=1e-5)
    assert saved["sharded"].shape == saved["whole"].shape
    for key, tensor in saved["whole"].state_dict().items():
        torch.testing.assert_close(saved["sharded"].state_dict()[key], tensor, atol=1e-5, rtol=1e-4, msg=key)
    assert together["sharded"][0] == pytest.approx(together["whole"][0], rel=1e-5)
    torch.testing.assert_close(together["sharded"][1], together["whole"][1], atol=1e-5, rtol=1e-4)
