"""The draft model before training: pruned from the target, or another model with the same tokenizer and no other."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer

from specdist.drafter_config import DraftArguments, TrainedSize
from specdist.drafters.causal_lm import load_draft_model, load_for_drafting, trainable_draft
from specdist.drafters.initial import ORIGIN_FILE, DraftOrigin, check_draft_model, make_draft_model, write_initial_draft
from specdist.drafters.vocabulary import read_vocabulary
from specdist.errors import ArtifactError, ConfigError, TokenizerMismatch
from specdist.provenance import read_json
from specdist.target import Target, open_target

TEXTS = [[5, 9, 30, 3], [17, 2, 8, 8, 21, 1]]


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def read_origin(directory: Path) -> DraftOrigin:
    return DraftOrigin.from_json(read_json(directory / ORIGIN_FILE))


def save_model(directory: Path, vocab_size: int, tokenizer) -> str:
    make_tiny_llama(vocab_size, layers=1, seed=7).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_no_such_draft_model_is_refused(target: Target) -> None:
    with pytest.raises(ArtifactError, match="no/such"):
        check_draft_model(DraftArguments(init="no/such"), target)


@pytest.mark.parametrize("layers", [[2], [0, 1, 2]])
def test_layers_that_the_target_lacks_are_refused_before_weights_are_read(target: Target, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="different layers, 0 to 1"):
        check_draft_model(DraftArguments(draft_layers=layers), target)


@pytest.mark.parametrize("rule", ["even", "ends", "importance"])
def test_the_checked_size_is_that_of_the_draft(target: Target, rule: str) -> None:
    arguments = DraftArguments(draft_layer_rule=rule, num_draft_layers=1)
    draft, _ = make_draft_model(arguments, target, TEXTS)
    assert check_draft_model(arguments, target) == TrainedSize.whole(draft.num_parameters())


def test_the_checked_size_knows_adapters_from_what_they_are_on(target: Target, tmp_path: Path) -> None:
    arguments = DraftArguments(draft_layers=[0], lora_rank=4)
    write_initial_draft(tmp_path, arguments, target)
    adapted = trainable_draft(tmp_path, arguments, "cpu")
    learned = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    total = sum(p.numel() for p in adapted.parameters()) - learned
    assert 0 < learned < total
    assert check_draft_model(arguments, target) == TrainedSize(total, learned, 4 * (total + learned))


def test_the_chosen_layers_lie_beside_the_draft(target: Target, tmp_path: Path) -> None:
    arguments = DraftArguments(draft_layer_rule="importance", num_draft_layers=1)
    origin = write_initial_draft(tmp_path, arguments, target, TEXTS)
    assert read_origin(tmp_path) == origin
    assert len(origin.block_influence) == 2
    assert origin.layers == [max((0, 1), key=origin.block_influence.__getitem__)]
    full, draft = target.load_model(torch.float32), load_draft_model(tmp_path, torch.float32)
    kept = full.model.layers[origin.layers[0]].mlp.up_proj.weight
    assert torch.equal(draft.model.layers[0].mlp.up_proj.weight, kept)


def test_a_reduced_vocabulary_lies_beside_a_draft_with_all_rows(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = torch.zeros(target.identity.vocab_size, dtype=torch.int64)
    counts[torch.tensor([70, 90])] = torch.tensor([30, 10])
    arguments = DraftArguments(draft_layers=[1], draft_vocab_size=3)
    with caplog.at_level(logging.INFO):
        origin = write_initial_draft(tmp_path, arguments, target, token_counts=counts)
    assert read_vocabulary(tmp_path).tolist() == sorted([70, *target.identity.eos_token_ids])
    assert origin.vocabulary_coverage == 0.75
    assert "3 of 268 tokens, 75.0 %" in caplog.text
    assert load_draft_model(tmp_path, torch.float32).get_output_embeddings().weight.shape[0] == 268
    model, vocabulary = load_for_drafting(tmp_path, target, torch.float32)
    assert model.get_output_embeddings().weight.shape[0] == len(vocabulary) == 3


@pytest.mark.parametrize("size", [1, 269])
def test_a_vocabulary_that_cannot_be_is_refused_before_work(target: Target, size: int) -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab_size = {size}: expected 2 .* to 268"):
        check_draft_model(DraftArguments(draft_layers=[0], draft_vocab_size=size), target)


def test_e4_d7_another_tokenizer_is_refused_by_its_first_differing_token(target: Target, tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["hello"])
    other = save_model(tmp_path / "other", len(tokenizer), tokenizer)
    with pytest.raises(TokenizerMismatch, match="first at token 'hello': target id None"):
        check_draft_model(DraftArguments(init=other), target)


def test_x7_a_pad_token_that_fine_tuning_added_is_cut_off(target: Target, tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert len(tokenizer) == target.identity.vocab_size + 1
    init = save_model(tmp_path / "padded", len(tokenizer), tokenizer)
    draft, _ = make_draft_model(DraftArguments(init=init), target)
    assert draft.config.vocab_size == target.identity.vocab_size
    before = load_draft_model(init, torch.float32).get_output_embeddings().weight
    assert torch.equal(draft.get_output_embeddings().weight, before[:-1])


@pytest.mark.parametrize("padding", [0, 12])
def test_e3_t5_same_tokenizer_with_padded_vocabulary_is_brought_to_the_targets(
    target: Target, tmp_path: Path, padding: int
) -> None:
    init = save_model(tmp_path / "padded", target.identity.vocab_size + padding, make_tiny_tokenizer())
    draft, origin = make_draft_model(DraftArguments(init=init), target)
    assert draft.config.vocab_size == target.identity.vocab_size
    assert draft.get_output_embeddings().weight.shape[0] == target.identity.vocab_size
    assert origin == DraftOrigin("padded")


def test_e3_t5_rows_that_are_added_are_never_the_best(tiny_target_dir: Path, tmp_path: Path) -> None:
    """The target has 280 rows for 268 tokens, the draft 268."""
    make_tiny_llama(280).save_pretrained(tmp_path / "target")
    make_tiny_tokenizer().save_pretrained(tmp_path / "target")
    target = open_target(str(tmp_path / "target"))
    draft, _ = make_draft_model(DraftArguments(init=save_model(tmp_path / "d", 268, make_tiny_tokenizer())), target)
    ids = torch.randint(0, 268, (1, 400), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = draft.eval()(ids).logits[0]
    assert logits.shape == (400, 280)
    assert int(logits.argmax(-1).max()) < 268
    assert float(logits.softmax(-1)[:, 268:].max()) <= 1 / 268
    assert torch.equal(draft.get_input_embeddings().weight[268:], torch.zeros(12, 32))
