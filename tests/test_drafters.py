"""The draft model before training: pruned from the target, or another model with the same tokenizer and no other."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer

from specdist.drafters.causal_lm import check_draft_model, make_draft_model, prune_layers
from specdist.errors import ArtifactError, ConfigError, TokenizerMismatch
from specdist.target import open_target


def test_pruning_takes_the_named_layers_and_all_the_rest() -> None:
    target = make_tiny_llama(40, layers=4)
    draft = prune_layers(target, [0, 3])
    ours, theirs = draft.state_dict(), target.state_dict()
    assert draft.config.num_hidden_layers == 2
    for name, tensor in ours.items():
        origin = name.replace("layers.1.", "layers.3.")
        assert torch.equal(tensor, theirs[origin]), name


def test_pruning_to_all_layers_is_the_target() -> None:
    target = make_tiny_llama(40, layers=3)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        assert torch.equal(prune_layers(target, [0, 1, 2]).eval()(ids).logits, target(ids).logits)


@pytest.mark.parametrize("layers", [[], [0, 0], [2], [-1]])
def test_layers_that_the_target_lacks_are_refused(tiny_target_dir: Path, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="different layers, 0 to 1"):
        check_draft_model("prune", layers, open_target(str(tiny_target_dir)))


def test_no_such_draft_model_is_refused(tiny_target_dir: Path) -> None:
    with pytest.raises(ArtifactError, match="no/such"):
        check_draft_model("no/such", [], open_target(str(tiny_target_dir)))


def save_model(directory: Path, vocab_size: int, tokenizer) -> str:
    make_tiny_llama(vocab_size, layers=1, seed=7).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_e4_d7_another_tokenizer_is_refused_by_its_first_differing_token(tiny_target_dir: Path, tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["hello"])
    other = save_model(tmp_path / "other", len(tokenizer), tokenizer)
    with pytest.raises(TokenizerMismatch, match="first at token 'hello': target id None"):
        check_draft_model(other, [], open_target(str(tiny_target_dir)))


@pytest.mark.parametrize("padding", [-0, 12])
def test_e3_t5_same_tokenizer_with_padded_vocabulary_is_brought_to_the_targets(
    tiny_target_dir: Path, tmp_path: Path, padding: int
) -> None:
    target = open_target(str(tiny_target_dir))
    init = save_model(tmp_path / "padded", target.identity.vocab_size + padding, make_tiny_tokenizer())
    draft = make_draft_model(init, [], target)
    assert draft.config.vocab_size == target.identity.vocab_size
    assert draft.get_output_embeddings().weight.shape[0] == target.identity.vocab_size
