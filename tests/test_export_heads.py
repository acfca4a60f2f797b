"""Exports of draft heads hold exactly what engines read, in every form, and come back with the same logits."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from heads_factory import FORMS, HIDDEN, VOCAB, export_heads, logits_of, make_heads, random_states
from safetensors.torch import load_file, save_file

from specdist.drafter_config import HYDRA, LOW_RANK, OWN, SHARED
from specdist.drafters.heads_file import HEADS_FILE, draft_tree, load_heads
from specdist.errors import ArtifactError, ConfigError
from specdist.export.medusa import as_exported, export_medusa
from specdist.export.record import EXPORT_FILE, read_record
from specdist.target import Target, open_target
from specdist.tree import DraftTree

SETTINGS = {"dtype": torch.float32, "checkpoint_step": 0}


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


@pytest.mark.parametrize(("kind", "projection"), FORMS)
def test_what_an_export_will_hold_is_known_before_it_is_written(
    target: Target, tmp_path: Path, kind: str, projection: str
) -> None:
    heads = make_heads(kind=kind, projection=projection)
    weight = target.load_model(torch.float32).get_output_embeddings().weight
    ahead = as_exported(heads, weight, torch.bfloat16)
    export_heads(target, tmp_path / "export", heads, torch.bfloat16)
    written = load_heads(tmp_path / "export" / HEADS_FILE, VOCAB)
    assert ahead.shape == written.shape
    for name, tensor in written.state_dict().items():
        assert torch.equal(ahead.state_dict()[name], tensor)


def test_the_tree_of_an_export_is_read_back(target: Target, tmp_path: Path) -> None:
    tree = DraftTree.of([(0,), (1,), (0, 0)], 3)
    export_heads(target, tmp_path / "with", tree=tree)
    export_heads(target, tmp_path / "without")
    assert draft_tree(tmp_path / "with", 3) == tree
    assert draft_tree(tmp_path / "without", 3) is None
    with pytest.raises(ConfigError, match="2 levels"):
        draft_tree(tmp_path / "with", 1)


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


def test_x5_a_config_of_heads_with_their_own_projections_says_so(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", make_heads(projection=OWN))
    config = read(tmp_path / "export/config.json")
    assert config["version"] == "1"
    assert config["medusa_fc_bias"] is True
    assert "original_lm_head" not in config  # with it, vLLM reads one projection for all heads


def engines_logits(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, num_layers: int) -> torch.Tensor:
    """vLLM's formula on the tensors of a file, for three heads: [3, N, V]."""
    logits = []
    for i in range(3):
        x = hidden
        for j in range(num_layers):
            x = x + torch.nn.functional.silu(x @ tensors[f"{i}.{j}.linear.weight"].T + tensors[f"{i}.{j}.linear.bias"])
        own = f"{i}.{num_layers}.weight"
        logits.append(x @ tensors[own if own in tensors else f"0.{num_layers}.weight"].T)
    return torch.stack(logits)


@pytest.mark.parametrize("projection", [SHARED, OWN, LOW_RANK])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_x2_an_engines_formula_on_the_file_gives_our_logits(
    target: Target, tmp_path: Path, num_layers: int, projection: str
) -> None:
    heads = make_heads(num_layers=num_layers, projection=projection)
    export_heads(target, tmp_path / "export", heads)
    tensors = load_file(tmp_path / "export" / HEADS_FILE)
    projections = [name for name in tensors if "linear" not in name]
    assert projections == [f"{i}.{num_layers}.weight" for i in range(1 if projection == SHARED else 3)]
    ours = logits_of(heads, target)
    difference = (engines_logits(tensors, random_states(), num_layers) - ours).abs().max()
    assert difference <= 1e-5 * ours.abs().max()


@pytest.mark.parametrize(("kind", "projection"), FORMS)
def test_x2_every_form_comes_back_with_the_same_logits(
    target: Target, tmp_path: Path, kind: str, projection: str
) -> None:
    heads = make_heads(num_layers=2, kind=kind, projection=projection)
    record = export_heads(target, tmp_path / "export", heads)
    assert record == read_record(tmp_path / "export")
    assert (record.format, record.drafter_kind) == (kind, kind)
    ours = logits_of(heads, target)
    again = logits_of(load_heads(tmp_path / "export" / HEADS_FILE, VOCAB), target)
    merged = kind != HYDRA and projection == LOW_RANK
    assert (again - ours).abs().max() <= (1e-5 * ours.abs().max() if merged else 0.0)


def test_x5_hydra_heads_say_that_no_engine_serves_them(target: Target, tmp_path: Path) -> None:
    record = export_heads(target, tmp_path / "export", make_heads(kind=HYDRA))
    config = read(tmp_path / "export/config.json")
    assert config["model_type"] == record.speculative_config["method"] == "hydra"
    assert config["hydra_num_heads"] == 3
    assert record.engines == {}
    assert [limit for limit in record.known_limits if limit.startswith("no engine serves")]


def test_factors_that_cannot_be_merged_are_refused(target: Target, tmp_path: Path) -> None:
    heads = make_heads(projection=LOW_RANK)
    heads.get_parameter("1.up.weight").data[3] = torch.inf
    with pytest.raises(ArtifactError, match="head 1: merging its low-rank difference"):
        export_heads(target, tmp_path / "export", heads)
    assert not (tmp_path / "export").exists()


def test_the_number_of_parameters_is_what_the_draft_holds(target: Target, tmp_path: Path) -> None:
    blocks = 3 * (HIDDEN * HIDDEN + HIDDEN)
    for projection, extra in ((SHARED, 0), (OWN, 3 * VOCAB * HIDDEN), (LOW_RANK, 3 * VOCAB * HIDDEN)):
        record = export_heads(target, tmp_path / projection, make_heads(projection=projection))
        assert record.num_parameters == blocks + extra


def test_a_tree_is_written_as_medusa_choices(target: Target, tmp_path: Path) -> None:
    tree = DraftTree.of([[1], [0, 0], [0], [0, 2]], 3)
    record = export_heads(target, tmp_path / "export", tree=tree)
    assert read(tmp_path / "export/config.json")["medusa_choices"] == [[0], [1], [0, 0], [0, 2]]
    assert [limit for limit in record.known_limits if "tree of 4 nodes" in limit]


def test_e12_a_tree_for_more_heads_than_there_are_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 levels, but there are 3 heads"):
        export_heads(target, tmp_path / "export", tree=DraftTree.chain(4))
    assert not (tmp_path / "export").exists()


def test_c6_a_projection_that_is_tied_to_the_embeddings_is_copied(target: Target, tmp_path: Path) -> None:
    model = make_tiny_llama(VOCAB, layers=1)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    weight = model.get_output_embeddings().weight
    assert weight is model.get_input_embeddings().weight
    export_medusa(make_heads(), weight, target, tmp_path / "export", num_speculative_tokens=1, **SETTINGS)
    assert torch.equal(load_file(tmp_path / "export" / HEADS_FILE)["0.1.weight"], weight)


def test_c6_heads_that_share_memory_are_saved_apart(target: Target, tmp_path: Path) -> None:
    heads = make_heads(projection=OWN)
    heads.load_state_dict(dict.fromkeys((f"{i}.1.weight" for i in range(3)), heads[0]["1"].weight), False, True)
    assert heads[0]["1"].weight.data_ptr() == heads[2]["1"].weight.data_ptr()
    export_heads(target, tmp_path / "export", heads)
    assert torch.equal(load_file(tmp_path / "export" / HEADS_FILE)["2.1.weight"], heads[0]["1"].weight)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_a_draft_length_beyond_the_heads_is_refused(
    target: Target, tmp_path: Path, num_speculative_tokens: int
) -> None:
    settings = {**SETTINGS, "num_speculative_tokens": num_speculative_tokens}
    with pytest.raises(ConfigError, match="3 heads draft 1 to 3"):
        export_medusa(make_heads(), torch.zeros(VOCAB, HIDDEN), target, tmp_path / "export", **settings)


@pytest.mark.parametrize("shape", [(VOCAB, HIDDEN + 1), (VOCAB - 1, HIDDEN)])
def test_heads_of_another_target_are_refused(target: Target, tmp_path: Path, shape: tuple[int, int]) -> None:
    settings = {**SETTINGS, "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="belong to another target"):
        export_medusa(make_heads(), torch.zeros(shape), target, tmp_path / "export", **settings)


def test_what_tgi_cannot_read_is_said_in_the_record(target: Target, tmp_path: Path) -> None:
    def limits(name: str, **form: object) -> list[str]:
        record = export_heads(target, tmp_path / name, make_heads(**form))
        return [limit for limit in record.known_limits if limit.startswith("TGI")]

    assert not limits("one")
    assert limits("two", num_layers=2)
    assert not limits("own", num_layers=2, projection=OWN)


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
    else:  # one output projection per head: the form of version 1
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
        ("version 1", r"1\.1\.weight"),
    ],
)
def test_x1_x2_c10_heads_of_another_form_are_refused(target: Target, tmp_path: Path, change: str, named: str) -> None:
    export_heads(target, tmp_path / "export")
    file = tmp_path / "export" / HEADS_FILE
    change_tensors(file, change)
    with pytest.raises(ArtifactError, match=named) as caught:
        load_heads(file, VOCAB)
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
        load_heads(file, VOCAB)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        read_record(tmp_path / "export")


def test_c8_a_missing_file_is_named(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export")
    (tmp_path / "export" / HEADS_FILE).unlink()
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        load_heads(tmp_path / "export" / HEADS_FILE, VOCAB)
    with pytest.raises(ArtifactError, match=HEADS_FILE):
        read_record(tmp_path / "export")
