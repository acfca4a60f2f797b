"""Weights on disk: cut, padded, incomplete, or tied in words only, each is refused by the file's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from safetensors.torch import load_file, save_file

from specdist.drafters.causal_lm import load_draft_model
from specdist.errors import ArtifactError
from specdist.target import open_target


def save_target(directory: Path, *, tied: bool, lm_head: str = "") -> Path:
    """A target. `lm_head` of a tied one: "" is in no file, "equal" and "other" are a second tensor."""
    model = make_tiny_llama(268, layers=1)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    if lm_head:
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (lm_head == "other")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut by 1": (lambda data: data[:-1], "truncated: .* bytes, its header asks for"),
    "cut in the header": (lambda data: data[:20], "its header is cut"),
    "empty": (lambda data: b"", "its header is cut"),
    "huge header": (lambda data: (1 << 60).to_bytes(8, "little") + data[8:], "its header is cut"),
    "padded": (lambda data: data + b"abc", "padded: .* bytes, its header asks for"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_c8_c9_weights_that_are_not_whole_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    file = save_target(tmp_path, tied=False) / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    for read in (lambda: load_draft_model(tmp_path, torch.float32), lambda: open_target(str(tmp_path))):
        with pytest.raises(ArtifactError, match=rf"model\.safetensors: .*{message}.*download or save it again"):
            read()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_c10_weights_that_lack_a_tensor_are_refused_by_its_name(tmp_path: Path, name: str) -> None:
    file = save_target(tmp_path, tied=False) / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"lack 1 tensors, such as \['{name}'\]"):
        load_draft_model(tmp_path, torch.float32)
    with pytest.raises(ArtifactError, match=rf"lack 1 tensors, such as \['{name}'\]"):
        open_target(str(tmp_path)).load_model(torch.float32)


@pytest.mark.parametrize("lm_head", ["", "equal"])
def test_l6_a_tied_target_is_tied_when_it_is_loaded(tmp_path: Path, lm_head: str) -> None:
    model = open_target(str(save_target(tmp_path, tied=True, lm_head=lm_head))).load_model(torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_l6_a_target_that_is_tied_in_words_only_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    save_target(tmp_path, tied=True, lm_head="other")
    with pytest.raises(ArtifactError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ.*set tie_word"):
        open_target(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_target(str(tmp_path)).load_model(torch.float32)  # the remedy works
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_l6_tensors_in_several_files_are_compared_too(tmp_path: Path) -> None:
    file = save_target(tmp_path, tied=True, lm_head="other") / "model.safetensors"
    tensors = load_file(file)
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, tmp_path / "model-2.safetensors")
    save_file(tensors, tmp_path / "model-1.safetensors")
    file.unlink()
    with pytest.raises(ArtifactError, match="differ"):
        open_target(str(tmp_path))
