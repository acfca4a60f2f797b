"""Training a draft model: the loss is TRL's, the prompt is not learned, a mean is over tokens and not over batches."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from datasets import Dataset
from draft_factory import (
    MIXTURE,
    ROWS,
    SFT,
    TARGET,
    examples,
    make_trainer,
    states_of,
    step,
    target_output,
    with_top_tokens,
)
from training_factory import sgd_settings
from trl import SFTConfig, SFTTrainer
from warm_process import run_ranks, run_script

from specdist.dataset.features import target_states
from specdist.errors import ConfigError
from specdist.losses import Objective
from specdist.target import output_projection
from specdist.training.arguments import settle_arguments
from specdist.training.batches import pack, schedule
from specdist.training.draft import check_training
from specdist.training.target_output import TargetOutput


def test_the_step_is_the_one_of_trls_own_loss(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path / "ours", examples(ROWS), batch=4)
    plain = SFTTrainer(
        make_tiny_llama(268),
        args=replace(ours.args, output_dir=str(tmp_path / "plain"), remove_unused_columns=True),
        train_dataset=examples(ROWS),
        processing_class=make_tiny_tokenizer(),
    )
    (loss, weights), (expected_loss, expected_weights) = step(ours), step(plain)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)


def test_t9_accumulation_gives_the_step_of_one_batch(tmp_path: Path) -> None:
    whole = step(make_trainer(tmp_path / "whole", examples(ROWS), batch=4))
    parts = step(make_trainer(tmp_path / "parts", examples(ROWS), batch=1, accumulation=4))
    assert parts[0] == pytest.approx(whole[0], rel=1e-4)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-5, rtol=1e-4)


def test_m13_a_batch_has_the_losses_of_its_rows_apart(tmp_path: Path) -> None:
    rows = [(1, 2), (1, 4)]
    together = step(make_trainer(tmp_path / "together", examples(rows), batch=2))[0]
    trainer = make_trainer(tmp_path / "apart", examples(rows), batch=1)
    losses = []
    for row in examples(rows):
        ids, prompt = torch.tensor([row["input_ids"]]), row["prompt_length"]
        with torch.inference_mode():
            logits = trainer.model(ids).logits[0, prompt - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum"))
    assert together == pytest.approx(float(sum(losses)) / 6, rel=1e-4)


@pytest.mark.parametrize("prompt", [4, 60])
def test_t2_a_long_prompt_does_not_shrink_the_loss(tmp_path: Path, prompt: int) -> None:
    trainer = make_trainer(tmp_path, examples([(prompt, 5)]), batch=1)
    row = examples([(prompt, 5)])[0]
    with torch.inference_mode():
        logits = trainer.model(torch.tensor([row["input_ids"]])).logits[0, prompt - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(row["input_ids"][prompt:]))
    assert step(trainer)[0] == pytest.approx(float(expected), rel=1e-4)


def test_frozen_embeddings_stay_and_the_layers_learn(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, examples(ROWS), batch=4, freeze=True)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    step(trainer)
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert not changed & {"model.embed_tokens.weight", "lm_head.weight"}


def test_m4_a_batch_of_prompts_only_is_no_nan(tmp_path: Path) -> None:
    rows = examples([(8, 0), (8, 0)])
    loss, weights = step(make_trainer(tmp_path, rows, batch=2))
    assert loss == 0.0
    assert torch.isfinite(weights).all()


def same_step(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=1e-5)


def test_the_distillation_step_is_the_eager_one(tmp_path: Path) -> None:
    rows, draft = examples(ROWS), make_tiny_llama(268)
    total, count = torch.zeros(()), 0
    for row in rows:
        ids, positions = torch.tensor([row["input_ids"]]), slice(row["prompt_length"] - 1, -1)
        with torch.no_grad():
            target = (TARGET(ids).logits[0, positions] / 0.7).log_softmax(-1)
        ours = (draft(ids).logits[0, positions] / 0.7).log_softmax(-1)
        labels = ids[0, row["prompt_length"] :]
        losses = torch.nn.functional.nll_loss(ours, labels, reduction="sum") * 0.5
        losses = losses + torch.nn.functional.kl_div(ours, target, log_target=True, reduction="sum")
        total = total + losses - torch.minimum(ours.exp(), target.exp()).sum(-1).log().sum()
        count += len(labels)
    (total / count).backward()
    expected = torch.cat([(p.detach() - 1e-2 * p.grad).flatten() for p in draft.parameters()])
    trained = step(make_trainer(tmp_path, rows, batch=4, objective=MIXTURE, target=target_output()))
    same_step(trained, (float(total.detach() / count), expected))


def test_stored_states_give_the_step_of_the_target_itself(tmp_path: Path) -> None:
    rows = examples(ROWS)
    live = step(make_trainer(tmp_path / "live", rows, batch=4, objective=MIXTURE, target=target_output()))
    collate = {"states": states_of(rows, tmp_path / "states")}
    stored = make_trainer(
        tmp_path / "stored", rows, batch=4, objective=MIXTURE, collate=collate, target=target_output(live=False)
    )
    same_step(step(stored), live)


def test_all_tokens_stored_as_best_give_the_step_of_the_full_distribution(tmp_path: Path) -> None:
    objective = replace(MIXTURE, temperature=1.0)
    rows = examples(ROWS)
    full = step(make_trainer(tmp_path / "full", rows, batch=4, objective=objective, target=target_output()))
    top = make_trainer(
        tmp_path / "top", with_top_tokens(rows, 267), batch=4, objective=objective, collate={"top": True}
    )
    same_step(step(top), full)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_t9_any_accumulation_gives_the_gradient_of_one_batch(tmp_path: Path, batch: int, accumulation: int) -> None:
    rows = examples([(4, 9), (11, 3), (2, 20), (7, 1), (5, 5), (3, 14), (9, 2), (6, 7)])

    def gradient(name: str, **sizes: int) -> torch.Tensor:
        # of plain SGD with a step of 1, the change of the weights is the gradient
        trainer = make_trainer(
            tmp_path / name, rows, objective=MIXTURE, target=target_output(), learning_rate=1.0, **sizes
        )
        before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
        return before - step(trainer)[1]

    whole, parts = gradient("whole", batch=8), gradient("parts", batch=batch, accumulation=accumulation)
    assert (whole - parts).norm() < 1e-6 * whole.norm()


def test_t8_the_prompt_is_not_distilled(tmp_path: Path) -> None:
    """A target that differs from the draft at prompt positions alone gives no loss."""
    rows = examples(ROWS)
    draft = make_tiny_llama(268)
    states = target_states(tmp_path / "states", rows, lambda: draft)
    trainer = make_trainer(
        tmp_path,
        rows,
        batch=4,
        objective=Objective({"forward_kl": 1.0}),
        collate={"states": states},
        target=TargetOutput(output_projection(draft, draft.config)),
    )
    assert abs(step(trainer)[0]) < 1e-5


@pytest.mark.parametrize("objective", [SFT, MIXTURE])
def test_m13_packed_documents_give_the_step_of_separate_rows(tmp_path: Path, objective: Objective) -> None:
    rows = examples([(4, 9), (11, 3), (2, 20), (7, 1), (1, 2), (1, 4)])
    target = target_output() if objective.needs_target else None
    apart = step(make_trainer(tmp_path / "apart", rows, batch=6, objective=objective, target=target))
    packed = make_trainer(
        tmp_path / "packed", rows, batch=8, objective=objective, target=target, collate={"packed": True}, max_length=24
    )
    assert sorted(packed.train_dataset["length"]) == [0] * 5 + [21, 22, 22]
    assert packed.data_collator(list(packed.train_dataset))["input_ids"].shape == (3, 22)  # a row of each pack
    same_step(step(packed), apart)


def test_packing_keeps_every_example_within_the_budget() -> None:
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = pack(lengths, 128)
    assert sorted(i for members in packs for i in members) == list(range(500))
    assert max(sum(lengths[i] for i in members) for members in packs) <= 128
    assert len(packs) <= 1.05 * sum(lengths) / 128
    assert pack([200, 3], 128) == [[0], [1]]  # too long for any pack: one of its own


def test_t5_padding_of_either_vocabulary_gets_no_probability(tmp_path: Path) -> None:
    """Tokenizer of 268; target with 300 rows, draft with 280: what lies above 268 counts nowhere."""
    rows = examples(ROWS)
    narrow_target, narrow_draft = make_tiny_llama(268, seed=7), make_tiny_llama(268)
    plain = make_trainer(
        tmp_path / "plain",
        rows,
        batch=4,
        objective=MIXTURE,
        target=TargetOutput(output_projection(narrow_target, narrow_target.config), narrow_target),
        draft=narrow_draft,
    )
    wide_target, wide_draft = make_tiny_llama(268, seed=7), make_tiny_llama(268)
    for model, size in ((wide_target, 300), (wide_draft, 280)):
        model.resize_token_embeddings(size, mean_resizing=False)
        model.get_output_embeddings().weight.data[268:] = 3.0  # probable, if they counted
    padded = make_trainer(
        tmp_path / "padded",
        rows,
        batch=4,
        objective=MIXTURE,
        target=TargetOutput(output_projection(wide_target, wide_target.config), wide_target),
        draft=wide_draft,
    )
    assert step(padded)[0] == pytest.approx(step(plain)[0], rel=1e-5)
    padding = wide_draft.get_output_embeddings().weight.data[268:]
    assert bool((padding == 3.0).all())  # and none of it was learned


@pytest.mark.parametrize("vocabulary", [None, torch.arange(200)], ids=["all", "reduced"])
def test_t5_best_tokens_and_labels_in_the_padding_are_none_that_the_draft_can_propose(
    tmp_path: Path, vocabulary: torch.Tensor | None
) -> None:
    """Tokenizer of 268, models with 272 rows: an id of the padding counts as one outside the draft's vocabulary."""
    best, logprobs = [5, 270, 9], [0.5, 0.3, 0.1]
    row = {"input_ids": [1, 2, 271, 7], "labels": [-100, -100, 271, 7], "prompt_length": 2}
    top = {"top_ids": best * 2, "top_logprobs": [math.log(p) for p in logprobs] * 2, "tail_mass": [0.1, 0.1]}
    draft = make_tiny_llama(272)
    objective = Objective({"cross_entropy": 1.0, "total_variation": 1.0})
    kept = torch.arange(268) if vocabulary is None else vocabulary
    with torch.inference_mode():
        ours = draft(torch.tensor([row["input_ids"]])).logits[0, 1:3, kept].log_softmax(-1)  # [2, R]
    overlap = torch.minimum(ours[:, [5, 9]].exp(), torch.tensor([0.5, 0.1])).sum(-1)
    expected = (-ours[1, 7] + (1 - overlap).sum()) / 2
    rows = Dataset.from_list([row | top])
    trainer = make_trainer(
        tmp_path, rows, batch=1, objective=objective, collate={"top": True}, draft=draft, vocabulary=vocabulary
    )
    assert step(trainer)[0] == pytest.approx(float(expected), rel=1e-4)


def test_a_reduced_vocabulary_leaves_other_rows_as_they_were(tmp_path: Path) -> None:
    kept = torch.arange(0, 268, 2)
    draft = make_tiny_llama(268)
    before = draft.get_output_embeddings().weight.detach().clone()
    trainer = make_trainer(
        tmp_path, examples(ROWS), batch=4, objective=MIXTURE, target=target_output(), vocabulary=kept, draft=draft
    )
    loss, _ = step(trainer)
    changed = (draft.get_output_embeddings().weight.detach() != before).any(dim=-1)
    assert loss > 0
    assert changed[kept].all()
    assert not changed[1::2].any()


def test_t10_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    results = []
    for name, processes, batch, accumulation in (("one", 1, 8, 1), ("two", 2, 4, 1), ("both", 2, 1, 4)):
        output = tmp_path / name / "result.pt"
        output.parent.mkdir()
        script = [str(Path(__file__).with_name("train_in_processes.py")), str(output), str(batch), str(accumulation)]
        alone = processes == 1
        done = [run_script(script, os.environ)] if alone else run_ranks(script, processes)
        assert not any(process.returncode for process in done), [process.stderr for process in done]
        results.append(torch.load(output))
    assert [result["processes"] for result in results] == [1, 2, 2]
    expected = results[0]
    for result in results[1:]:
        assert (result["gradient"] - expected["gradient"]).norm() < 1e-6 * expected["gradient"].norm()
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_sharded_draft_has_the_gradient_of_a_whole_one() -> None:
    done = run_ranks([str(Path(__file__).with_name("shard_in_processes.py"))], 2)
    assert not any(process.returncode for process in done), [process.stderr for process in done]


@pytest.mark.parametrize("kind", ["states", "top", "packed"])
def test_a_batch_of_items_without_members_teaches_nothing(tmp_path: Path, kind: str) -> None:
    rows = with_top_tokens(examples(ROWS), 5)
    collate = {"states": {"states": states_of(rows, tmp_path / "states")}, "top": {"top": True}}.get(kind)
    trainer = make_trainer(
        tmp_path,
        rows,
        batch=4,
        objective=MIXTURE,
        target=target_output(),
        collate=collate or {"packed": True},
        max_length=64,
    )
    batch = trainer.data_collator([{"members": [], "length": 0}] * 2)
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=7)
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_m13_t10_what_no_trainer_honours_is_refused_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(**extra: Any) -> SFTConfig:
        return SFTConfig(**sgd_settings(tmp_path, activation_checkpointing=False, **extra))

    check_training(settings(), on_policy=True)
    with pytest.raises(ConfigError, match="average_tokens_across_devices = false"):
        check_training(settings(average_tokens_across_devices=False), on_policy=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_training(settings(), on_policy=False)
    with pytest.raises(ConfigError, match="on_policy_share with FSDP"):
        check_training(settings(), on_policy=True)


def test_one_process_trains_on_one_of_several_gpus(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    settings = sgd_settings(tmp_path, activation_checkpointing=False, per_device_train_batch_size=4)
    arguments = SFTConfig(**settings)
    arguments._n_gpu = 2  # as where two are in sight
    settle_arguments(arguments)
    assert (arguments.n_gpu, arguments.train_batch_size) == (1, 4)
    assert "accelerate launch --num_processes 2" in caplog.text


def test_the_last_batches_are_filled_with_nothing(tmp_path: Path) -> None:
    rows = examples([(3, 4)] * 5)
    padded = schedule(rows, multiple_of=4)
    assert padded["members"] == [[0], [1], [2], [3], [4], [], [], []]
    assert padded["length"] == [7] * 5 + [0] * 3


def test_t1_every_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    ids = list(range(10, 16))
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids, "prompt_length": 0}])
    trainer = make_trainer(tmp_path, rows, batch=1)
    with torch.inference_mode():
        logits = trainer.model(torch.tensor([ids])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))  # a mean over 5 positions
    loss, _ = step(trainer)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_t12_frozen_embeddings_are_neither_trained_nor_held_by_the_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, examples(ROWS), batch=4, freeze=True)
    frozen = {"model.embed_tokens.weight", "lm_head.weight"}
    before = {name: trainer.model.get_parameter(name).detach().clone() for name in frozen}
    step(trainer)
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in trainer.model.named_parameters()} - frozen
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(trainer.model.get_parameter(name)) for name in trainable}
    assert all(torch.equal(trainer.model.get_parameter(name), value) for name, value in before.items())


def test_l3_mixed_precision_on_a_cpu_distils(tmp_path: Path) -> None:
    rows = examples(ROWS)
    half = make_trainer(tmp_path / "half", rows, batch=4, objective=MIXTURE, target=target_output(), bf16=True)
    whole = make_trainer(tmp_path / "whole", rows, batch=4, objective=MIXTURE, target=target_output())
    (loss, weights), (expected, _) = step(half), step(whole)
    assert loss == pytest.approx(expected, rel=2e-2)
    assert weights.dtype == torch.float32
    assert torch.isfinite(weights).all()
