"""The draft model before training: pruned from the target, or another model with the same tokenizer and no other."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

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


def test_m12_a_draft_without_a_row_for_each_token_is_refused_by_the_first(target: Target, tmp_path: Path) -> None:
    init = save_model(tmp_path / "narrow", 260, make_tiny_tokenizer())
    first = target.tokenizer.convert_ids_to_tokens(260)
    with pytest.raises(ConfigError, match=rf"token {first!r} has id 260, but the model has only 260 embedding rows"):
        check_draft_model(DraftArguments(init=init), target)


@pytest.mark.parametrize(("positions", "fits"), [(511, False), (512, True)])
def test_e11_a_draft_whose_positions_end_before_the_targets_is_refused(
    target: Target, tmp_path: Path, positions: int, fits: bool
) -> None:
    assert target.context_length == 512
    GPT2LMHeadModel(GPT2Config(vocab_size=268, n_embd=8, n_layer=1, n_head=2, n_positions=positions)).save_pretrained(
        tmp_path
    )
    make_tiny_tokenizer().save_pretrained(tmp_path)
    if fits:
        assert check_draft_model(DraftArguments(init=str(tmp_path)), target).total > 0
        return
    for refused in (
        lambda: check_draft_model(DraftArguments(init=str(tmp_path)), target),
        lambda: load_for_drafting(tmp_path, target, torch.float32),
    ):
        with pytest.raises(ConfigError, match="it has 511 positions, the target reads 512"):
            refused()


def test_e11_rotary_positions_have_no_end(target: Target, tmp_path: Path) -> None:
    model = make_tiny_llama(268, layers=1)
    model.config.max_position_embeddings = 64
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    assert check_draft_model(DraftArguments(init=str(tmp_path)), target).total > 0


@pytest.mark.parametrize("init", ["prune", "other"])
def test_x3_a_contradictory_generation_config_is_kept_beside_a_draft_that_can_be_saved(
    tiny_target_dir: Path, tmp_path: Path, init: str
) -> None:
    source = shutil.copytree(tiny_target_dir, tmp_path / "source")
    asked = json.dumps({"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 267})
    (source / "generation_config.json").write_text(asked)
    arguments = DraftArguments(draft_layers=[0]) if init == "prune" else DraftArguments(init=str(source))
    write_initial_draft(tmp_path / "init", arguments, open_target(str(source)))
    assert (tmp_path / "init" / "generation_config.original.json").read_text() == asked
    model = load_draft_model(tmp_path / "init", torch.float32)
    assert model.generation_config.eos_token_id == 267
    model.save_pretrained(tmp_path / "checkpoint-1")  # as the trainer does; it raised, and no weights were there
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


def test_c7_a_draft_that_is_tied_in_words_only_is_written_as_what_it_is(target: Target, tmp_path: Path) -> None:
    init = save_model(tmp_path / "other", 268, make_tiny_tokenizer())
    config = read_json(tmp_path / "other" / "config.json") | {"tie_word_embeddings": True}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    write_initial_draft(tmp_path / "init", DraftArguments(init=init), target)
    assert read_json(tmp_path / "init" / "config.json")["tie_word_embeddings"] is False
    before, after = (load_draft_model(path, torch.float32) for path in (init, tmp_path / "init"))
    with torch.inference_mode():
        assert torch.equal(after(torch.tensor(TEXTS[:1])).logits, before(torch.tensor(TEXTS[:1])).logits)


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
