"""Distillation on the draft's own text: what a batch holds then, who writes it, and batches that hold nothing."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from draft_factory import MIXTURE, ROWS, examples, make_trainer, on_policy, target_output

from specdist.drafter_config import DraftArguments
from specdist.drafters.adapter import add_adapters
from specdist.training.batches import DraftCollator, schedule
from specdist.training.on_policy import documents


def test_on_policy_batches_hold_the_drafts_own_answers_and_teach_no_tokens(tmp_path: Path) -> None:
    rows, draft = examples(ROWS), make_tiny_llama(268)
    batch = DraftCollator(rows, 0)([{"members": [i]} for i in range(4)])
    (made,) = on_policy(1.0).rewrite(draft, [batch], step=5)
    (again,) = on_policy(1.0).rewrite(draft, [batch], step=5)
    assert torch.equal(made["input_ids"], again["input_ids"])  # a resumed run draws the same
    ours, theirs = documents(made), documents(batch)
    assert [prompt for ((prompt, _),) in ours] == [prompt for ((prompt, _),) in theirs]
    assert all(len(a) <= max(2, len(b)) for ((_, a),), ((_, b),) in zip(ours, theirs, strict=True))
    assert ours != theirs
    assert on_policy(0.0).rewrite(draft, [batch], step=5) == [batch]
    packed = DraftCollator(rows, 0, packed=True)([{"members": [0, 1]}, {"members": []}, {"members": [2, 3]}])
    (packed_made,) = on_policy(1.0).rewrite(draft, [packed], step=5)
    assert documents(packed_made) == [ours[0] + ours[1], ours[2] + ours[3]]
    # the labels say where to learn, not what: on the draft's own text cross-entropy is nothing
    trainer = make_trainer(tmp_path, rows, batch=4, objective=MIXTURE, target=target_output(), on_policy=on_policy(1.0))
    trainer.train()
    terms = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert terms["loss/cross_entropy"] == 0.0
    assert terms["loss/forward_kl"] > 0.0


@pytest.mark.parametrize("packed", [False, True])
def test_a_process_whose_batch_holds_no_document_writes_nothing(packed: bool) -> None:
    """Of 5 examples in 4 processes one gets items without members alone."""
    items = schedule(examples([*ROWS, (3, 4)]), multiple_of=4)
    collator = DraftCollator(examples(ROWS), 0, packed=packed)
    batch, empty = collator([{"members": [0]}]), collator([items[7]])
    made, same = on_policy(1.0).rewrite(make_tiny_llama(268), [batch, empty], step=0)
    assert "on_policy" in made
    assert same is empty


def test_on_policy_answers_of_adapters_are_those_of_the_base_that_holds_them(tmp_path: Path) -> None:
    draft = add_adapters(make_tiny_llama(268), DraftArguments(draft_layers=[0], lora_rank=4), seed=0)
    for name, parameter in draft.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trainer = make_trainer(tmp_path, examples(ROWS), batch=4, on_policy=on_policy(1.0), draft=draft)
    batch, shapes = trainer.data_collator([{"members": [i]} for i in range(4)]), []
    base = draft.get_base_model()
    base.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape))
    ((made,), _) = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert {shape[1] for shape in shapes} == {1}  # logits of the last token alone, prompts included
    assert draft.training
    (merged,) = on_policy(1.0).rewrite(draft.merge_and_unload(), [batch], step=0)
    assert documents(made) == documents(merged)


def test_the_share_of_on_policy_batches_is_as_asked() -> None:
    draft, batch = make_tiny_llama(268), DraftCollator(examples([(3, 1)]), 0)([{"members": [0]}])
    made = [on_policy(0.3).rewrite(draft, [batch], step)[0] for step in range(300)]
    assert 0.2 < sum("on_policy" in b for b in made) / 300 < 0.4
