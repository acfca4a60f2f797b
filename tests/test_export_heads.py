"""Exported draft heads: what engines read, what an engine's own formula makes of it, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from heads_factory import FORMS, HIDDEN, export_heads, logits_of, make_heads, random_states
from safetensors.torch import load_file, save_file

from specdist.drafter_config import HYDRA, LOW_RANK, OWN, SHARED
from specdist.drafters.heads_file import HEADS_FILE, load_heads
from specdist.errors import ArtifactError, ConfigError
from specdist.export import medusa
from specdist.export.record import EXPORT_FILE, read_record
from specdist.target import Target, open_target
from specdist.tree import DraftTree


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_x1_the_tensors_of_a_medusa_export_are_exactly_those_engines_read(
    target: Target, tmp_path: Path, num_layers: int
) -> None:
    heads = make_heads(num_layers=num_layers)
    export_heads(target, tmp_path / "export", heads, torch.bfloat16)
    tensors = load_file(tmp_path / "export" / HEADS_FILE)
    blocks = [f"{i}.{j}.linear" for i in range(3) for j in range(num_layers)]
    shapes: dict[str, tuple[int, ...]] = {f"{block}.weight": (HIDDEN, HIDDEN) for block in blocks}
    shapes |= {f"{block}.bias": (HIDDEN,) for block in blocks}
    shapes[f"0.{num_layers}.weight"] = (target.identity.vocab_size, HIDDEN)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
    assert "lm_head.weight" not in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert {p.name for p in (tmp_path / "export").iterdir()} == {HEADS_FILE, "config.json", EXPORT_FILE}


def test_x5_the_keys_of_a_medusa_config_are_exactly_those_engines_read(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", make_heads(num_layers=2))
    assert read(tmp_path / "export/config.json") == {
        "model_type": "medusa",
        "version": "2",
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "hidden_size": HIDDEN,
        "vocab_size": target.identity.vocab_size,
        "base_model_name_or_path": "tiny-target",
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("projection", [SHARED, OWN, LOW_RANK])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_an_engines_formula_on_the_file_gives_our_logits(
    target: Target, tmp_path: Path, num_layers: int, projection: str
) -> None:
    heads = make_heads(num_layers=num_layers, projection=projection)
    expected = logits_of(heads, target)
    export_heads(target, tmp_path / "export", heads)
    tensors = load_file(tmp_path / "export" / HEADS_FILE)
    assert not [name for name in tensors if "up" in name or "down" in name]
    for i in range(3):
        x = random_states()
        for j in range(num_layers):
            weight, bias = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        weight = tensors[f"{0 if projection == SHARED else i}.{num_layers}.weight"]
        torch.testing.assert_close(x @ weight.T, expected[i], atol=1e-4, rtol=1e-4)
    original = read(tmp_path / "export/config.json").get("original_lm_head", False)
    assert original == (projection == SHARED), "vLLM drops every projection but the first where it says original"


@pytest.mark.parametrize(("kind", "projection"), FORMS)
def test_an_export_is_read_back_with_the_same_logits(
    target: Target, tmp_path: Path, kind: str, projection: str
) -> None:
    heads = make_heads(kind=kind, projection=projection)
    expected = logits_of(heads, target)
    record = export_heads(target, tmp_path / "export", heads)
    again = load_heads(tmp_path / "export" / HEADS_FILE, target.identity.vocab_size)
    assert again.shape.kind == record.drafter_kind == kind
    torch.testing.assert_close(logits_of(again, target), expected, atol=1e-4, rtol=1e-4)
    assert record.num_parameters == sum(p.numel() for p in again.parameters())


def test_x1_no_engine_is_said_to_serve_hydra(target: Target, tmp_path: Path) -> None:
    record = export_heads(target, tmp_path / "export", make_heads(kind=HYDRA))
    assert record.engines == {}
    assert "no engine serves Hydra" in record.known_limits[0]
    assert record.speculative_config["method"] == HYDRA


def test_a_tree_goes_along_and_one_for_more_heads_is_refused(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", tree=DraftTree.of([[0], [1], [0, 0]], 3))
    assert read(tmp_path / "export/config.json")["medusa_choices"] == [[0], [1], [0, 0]]
    with pytest.raises(ConfigError, match="4 levels, but there are 3 heads"):
        export_heads(target, tmp_path / "other", tree=DraftTree.chain(4))


def test_a_low_rank_difference_that_cannot_be_merged_is_refused(target: Target, tmp_path: Path) -> None:
    heads = make_heads(projection=LOW_RANK)
    heads.get_parameter("1.up.weight").data.fill_(torch.inf)
    with pytest.raises(ArtifactError, match="head 1: merging"):
        export_heads(target, tmp_path / "export", heads)
    assert not (tmp_path / "export").exists()


def test_c6_a_projection_that_is_tied_to_the_embeddings_is_copied(target: Target, tmp_path: Path) -> None:
    projection = torch.nn.Embedding(target.identity.vocab_size, HIDDEN).weight
    medusa.export_medusa(
        make_heads(),
        projection,
        target,
        tmp_path / "export",
        dtype=torch.float32,
        num_speculative_tokens=1,
        checkpoint_step=0,
    )
    assert torch.equal(load_file(tmp_path / "export" / HEADS_FILE)["0.1.weight"], projection)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_a_draft_length_beyond_the_heads_is_refused(
    target: Target, tmp_path: Path, num_speculative_tokens: int
) -> None:
    with pytest.raises(ConfigError, match="3 heads draft 1 to 3"):
        medusa.export_medusa(
            make_heads(),
            torch.zeros(target.identity.vocab_size, HIDDEN),
            target,
            tmp_path / "export",
            dtype=torch.float32,
            num_speculative_tokens=num_speculative_tokens,
            checkpoint_step=0,
        )


@pytest.mark.parametrize("shape", [(268, HIDDEN + 1), (267, HIDDEN)])
def test_heads_of_another_target_are_refused(target: Target, tmp_path: Path, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="belong to another target"):
        medusa.export_medusa(
            make_heads(),
            torch.zeros(shape),
            target,
            tmp_path / "export",
            dtype=torch.float32,
            num_speculative_tokens=3,
            checkpoint_step=0,
        )


def test_what_tgi_cannot_read_is_said_in_the_record(target: Target, tmp_path: Path) -> None:
    assert not [x for x in export_heads(target, tmp_path / "one").known_limits if x.startswith("TGI")]
    limits = export_heads(target, tmp_path / "two", make_heads(num_layers=2)).known_limits
    assert [x for x in limits if x.startswith("TGI")]


def change_tensors(path: Path, change: str) -> None:
    tensors = load_file(path)
    if change == "renamed":
        tensors["1.0.linear.wieght"] = tensors.pop("1.0.linear.weight")
    elif change == "missing":
        del tensors["2.0.linear.bias"]
    elif change == "a head between is missing":
        del tensors["1.0.linear.weight"], tensors["1.0.linear.bias"]
    elif change == "wrong shape":
        tensors["1.0.linear.bias"] = torch.zeros(HIDDEN - 1)
    elif change == "empty":
        tensors["1.0.linear.bias"] = torch.zeros(0)
    elif change == "native names":
        tensors = {f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(3)}
    else:  # output projections of some heads only
        tensors["1.1.weight"] = tensors["0.1.weight"].clone()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("renamed", r"1\.0\.linear\.wieght"),
        ("missing", r"2\.0\.linear\.bias"),
        ("a head between is missing", r"1\.0\.linear\.weight"),
        ("wrong shape", r"1\.0\.linear\.bias"),
        ("empty", r"1\.0\.linear\.bias"),
        ("native names", r"blocks\.0\.layers"),
        ("some projections", r"1\.1\.weight"),
    ],
)
def test_x1_x2_c10_heads_of_another_form_are_refused(target: Target, tmp_path: Path, change: str, named: str) -> None:
    export_heads(target, tmp_path / "export")
    file = tmp_path / "export" / HEADS_FILE
    change_tensors(file, change)
    with pytest.raises(ArtifactError, match=named) as caught:
        load_heads(file, target.identity.vocab_size)
    assert str(file) in str(caught.value)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        read_record(tmp_path / "export")


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    path.write_bytes(
        {
            "one byte short": data[:-1],
            "cut in the header": data[:20],
            "empty": b"",
            "huge header": (1 << 60).to_bytes(8, "little") + data[8:],
            "three bytes more": data + b"\0\0\0",
        }[kind]
    )


@pytest.mark.parametrize("kind", ["one byte short", "cut in the header", "empty", "huge header", "three bytes more"])
def test_c8_c9_a_damaged_file_is_named(target: Target, tmp_path: Path, kind: str) -> None:
    export_heads(target, tmp_path / "export")
    file = tmp_path / "export" / HEADS_FILE
    damage(file, kind)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        load_heads(file, target.identity.vocab_size)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        read_record(tmp_path / "export")


def test_c8_a_missing_file_is_named(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export")
    (tmp_path / "export" / HEADS_FILE).unlink()
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        load_heads(tmp_path / "export" / HEADS_FILE, target.identity.vocab_size)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        read_record(tmp_path / "export")
