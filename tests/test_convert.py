"""`specdist export`: each engine's layout holds all that the engine reads, and what it would lose is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from heads_factory import HIDDEN, VOCAB, export_heads, logits_of, make_heads
from safetensors.torch import load_file, save_file

from specdist import cli
from specdist.drafter_config import HYDRA, LOW_RANK, OWN, SHARED
from specdist.drafters.heads_file import HEADS_FILE, load_heads
from specdist.drafters.prune import prune_layers
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.export.convert import convert
from specdist.export.draft_model import export_draft_model
from specdist.export.engines import ENGINES, VLLM, Shapes, check_readable
from specdist.export.record import read_record, write_record
from specdist.target import Target, open_target
from specdist.tree import DraftTree


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def change_config(directory: Path, **keys: object) -> None:
    """Change keys of an export's configuration (None: leave out), as one who then writes its record again."""
    config = json.loads((directory / "config.json").read_text()) | keys
    kept = {key: value for key, value in config.items() if value is not None}
    record = read_record(directory)
    (directory / "config.json").write_text(json.dumps(kept))
    write_record(directory, record)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("projection", [SHARED, OWN, LOW_RANK])
def test_x1_x2_every_layout_gives_the_same_logits(target: Target, tmp_path: Path, engine: str, projection: str) -> None:
    export_heads(target, tmp_path / "export", make_heads(projection=projection))
    record = convert(tmp_path / "export", tmp_path / "out", engine)
    assert read_record(tmp_path / "out") == record
    assert list(record.engines) == [engine]
    ours, theirs = (load_heads(tmp_path / name / HEADS_FILE, VOCAB) for name in ("export", "out"))
    assert torch.equal(logits_of(theirs, target), logits_of(ours, target))


def test_x2_the_version_says_which_form_the_heads_have(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", tree=DraftTree.chain(2))
    for engine, version, projections in (("vllm", "2", 1), ("tgi", "2", 1), ("original", "1", 3)):
        convert(tmp_path / "export", tmp_path / engine, engine)
        config = json.loads((tmp_path / engine / "config.json").read_text())
        assert config["version"] == version
        assert config["medusa_choices"] == [[0], [0, 0]]
        assert sum("linear" not in name for name in load_file(tmp_path / engine / HEADS_FILE)) == projections


def test_x2_tgi_reads_several_blocks_only_with_projections_per_head(target: Target, tmp_path: Path) -> None:
    heads = make_heads(num_layers=2)
    export_heads(target, tmp_path / "export", heads)
    convert(tmp_path / "export", tmp_path / "out", "tgi")
    tensors = load_file(tmp_path / "out" / HEADS_FILE)
    assert torch.equal(tensors["2.2.weight"], target.load_model(torch.float32).get_output_embeddings().weight)
    assert torch.equal(logits_of(load_heads(tmp_path / "out" / HEADS_FILE, VOCAB), target), logits_of(heads, target))


def test_x2_the_original_would_keep_one_of_several_blocks(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", make_heads(num_layers=2))
    with pytest.raises(ConfigError, match="would keep the last alone"):
        convert(tmp_path / "export", tmp_path / "out", "original")
    assert not (tmp_path / "out").exists()


def test_the_original_is_told_how_to_make_its_pickle(target: Target, tmp_path: Path) -> None:
    heads = make_heads()
    export_heads(target, tmp_path / "export", heads)
    record = convert(tmp_path / "export", tmp_path / "out", "original")
    assert not list((tmp_path / "out").glob("*.pt"))
    line = next(limit for limit in record.known_limits if "python -c" in limit)
    code = line.split('python -c "')[1].removesuffix('"')
    for name in (HEADS_FILE, "medusa_lm_head.pt"):
        code = code.replace(f"'{name}'", repr(str(tmp_path / "out" / name)))
    exec(code)
    pickled = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    assert torch.equal(pickled["1.0.linear.weight"], heads.get_parameter("1.0.linear.weight"))


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"medusa_fc_bias": None}, r"0\.0\.linear\.bias.* would not be read"),
        ({"hidden_size": None}, "have another shape"),
        ({"vocab_size": VOCAB - 1}, r"0\.1\.weight.* have another shape"),
        ({"original_lm_head": None}, r"1\.1\.weight.* would stay uninitialised"),
        ({"medusa_num_heads": 4}, r"3\.0\.linear\.bias.* would stay uninitialised"),
        ({"medusa_num_heads": 2}, r"2\.0\.linear\.bias.* would not be read"),
        ({"num_attention_heads": 4}, r"3\.0\.linear\.bias.* would stay uninitialised"),
        ({"num_hidden_layers": 2}, r"0\.1\.linear\.bias.* would stay uninitialised"),
        ({"truncated_vocab_size": 100}, "cannot read a reduced vocabulary"),
        ({"model_type": "llama"}, "no engine serves these heads"),
    ],
)
def test_x1_x5_a_configuration_by_which_vllm_loses_a_tensor_is_refused(
    target: Target, tmp_path: Path, keys: dict[str, object], fault: str
) -> None:
    export_heads(target, tmp_path / "export")
    change_config(tmp_path / "export", **keys)
    with pytest.raises(SpecdistError, match=fault):
        convert(tmp_path / "export", tmp_path / "out", VLLM)
    assert not (tmp_path / "out").exists()


def test_c7_projections_that_differ_are_not_dropped_as_one(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export", make_heads(projection=OWN))
    change_config(tmp_path / "export", original_lm_head=True)
    with pytest.raises(ArtifactError, match=r"'1\.1\.weight', '2\.1\.weight'\] would not be read"):
        convert(tmp_path / "export", tmp_path / "out", VLLM)


def test_x1_vllm_would_not_initialise_a_projection_that_is_missing(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export")
    record = read_record(tmp_path / "export")
    tensors = load_file(tmp_path / "export" / HEADS_FILE)
    del tensors["0.1.weight"]
    save_file(tensors, tmp_path / "export" / HEADS_FILE)
    write_record(tmp_path / "export", record)
    with pytest.raises(ArtifactError, match=r"\['0\.1\.weight'\] would stay uninitialised"):
        convert(tmp_path / "export", tmp_path / "out", VLLM)


@pytest.mark.parametrize("engine", ENGINES)
def test_c10_a_tensor_of_size_0_is_refused(engine: str) -> None:
    heads = make_heads(projection=OWN)
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    config = {"model_type": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 1, "medusa_fc_bias": True}
    config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    check_readable(engine, config, shapes)
    with pytest.raises(ArtifactError, match=r"2\.0\.linear\.bias.* have another shape"):
        check_readable(engine, config, shapes | {"2.0.linear.bias": (0,)})


def test_tgi_builds_no_speculator_with_architectures() -> None:
    shapes: Shapes = {"0.0.linear.weight": (8, 8), "0.0.linear.bias": (8,)}
    config = {"model_type": "medusa", "medusa_num_heads": 1, "medusa_num_layers": 1, "hidden_size": 8, "vocab_size": 9}
    check_readable("tgi", config, shapes)
    with pytest.raises(ConfigError, match="architectures"):
        check_readable("tgi", config | {"architectures": ["MedusaModel"]}, shapes)
    with pytest.raises(ConfigError, match="write both"):
        check_readable("tgi", {"model_type": "medusa", "num_heads": 1}, shapes)


@pytest.mark.parametrize("engine", ENGINES)
def test_hydra_heads_are_refused_for_any_engine(target: Target, tmp_path: Path, engine: str) -> None:
    export_heads(target, tmp_path / "export", make_heads(kind=HYDRA))
    with pytest.raises(ConfigError, match="no engine serves these heads"):
        convert(tmp_path / "export", tmp_path / "out", engine)


@pytest.mark.parametrize("name", ["my-Eagle-heads", "eagle3", "dflash", "x-dspark"])
def test_a_path_that_vllm_misreads_is_refused(target: Target, tmp_path: Path, name: str) -> None:
    export_heads(target, tmp_path / "export")
    with pytest.raises(ConfigError, match="vLLM misreads a path"):
        convert(tmp_path / "export", tmp_path / name / "out", VLLM)
    convert(tmp_path / "export", tmp_path / name / "out", "tgi")


def test_c6_the_copy_of_the_projection_is_compared_with_the_target(target: Target, tmp_path: Path) -> None:
    export_heads(target, tmp_path / "export")
    convert(tmp_path / "export", tmp_path / "right", "tgi", target=target, base_model="org/base")
    assert json.loads((tmp_path / "right/config.json").read_text())["base_model_name_or_path"] == "org/base"
    record = read_record(tmp_path / "export")
    tensors = load_file(tmp_path / "export" / HEADS_FILE)
    tensors["0.1.weight"][3] += 1
    save_file(tensors, tmp_path / "export" / HEADS_FILE)
    write_record(tmp_path / "export", record)
    with pytest.raises(ConfigError, match="copy of the output projection is not the target's"):
        convert(tmp_path / "export", tmp_path / "wrong", VLLM, target=target)


def test_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    other = Path(shutil.copytree(target.path, tmp_path / "other"))
    make_tiny_llama(VOCAB, seed=9).save_pretrained(other)
    export_heads(target, tmp_path / "export")
    with pytest.raises(ConfigError, match="but the export was made for tiny-target"):
        convert(tmp_path / "export", tmp_path / "out", VLLM, target=open_target(str(other)))


def test_a_run_is_found_by_its_directory_and_nothing_is_written_over(target: Target, tmp_path: Path) -> None:
    record = export_heads(target, tmp_path / "run/export")
    assert convert(tmp_path / "run", tmp_path / "out", VLLM).drafter_sha256 == record.drafter_sha256
    with pytest.raises(ConfigError, match="exists already"):
        convert(tmp_path / "run", tmp_path / "out", VLLM)
    with pytest.raises(ArtifactError, match=r"no export\.json there or in"):
        convert(tmp_path, tmp_path / "new", VLLM)


def test_a_draft_model_goes_to_vllm_as_it_is(target: Target, tmp_path: Path) -> None:
    model = prune_layers(target.load_model(torch.float32), [1])
    settings = {"dtype": torch.float32, "num_speculative_tokens": 4, "checkpoint_step": 7}
    record = export_draft_model(model, target, tmp_path / "export", **settings)
    assert convert(tmp_path / "export", tmp_path / "out", VLLM) == record
    assert read_record(tmp_path / "out") == record
    with pytest.raises(ConfigError, match="reads Medusa heads alone"):
        convert(tmp_path / "export", tmp_path / "tgi", "tgi")


def test_the_command_says_what_it_wrote_and_what_it_refused(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = export_heads(target, tmp_path / "export", make_heads(num_layers=2))
    command = ["export", "--target", str(target.path), str(tmp_path / "export")]
    assert cli.main([*command, str(tmp_path / "out"), "--format", "vllm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'out'}: medusa for tiny-target")
    assert record.known_limits[0] in out
    assert read_record(tmp_path / "out").drafter_sha256 == record.drafter_sha256  # no path of this machine in it
    assert cli.main([*command, str(tmp_path / "none"), "--format", "original"]) == 2
    assert "would keep the last alone" in capsys.readouterr().err
