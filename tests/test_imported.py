"""`specdist import`: heads trained elsewhere, in every known layout, give here the logits that they gave there."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from heads_factory import HIDDEN, VOCAB, export_heads, logits_of, make_heads, random_states
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdist import cli
from specdist.drafter_config import HYDRA, OWN
from specdist.drafters.heads_file import HEADS_FILE, load_heads
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.export.imported import import_heads
from specdist.export.record import read_record
from specdist.target import Target, open_target


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def original_heads(num_layers: int = 1) -> torch.nn.ModuleList:
    """Three heads as the original code has them: blocks, then a projection."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.nn.functional.silu(self.linear(x))

    heads = torch.nn.ModuleList()
    for _ in range(3):
        blocks = [Block() for _ in range(num_layers)]
        heads.append(torch.nn.Sequential(*blocks, torch.nn.Linear(HIDDEN, VOCAB, bias=False)))
    for seed, parameter in enumerate(heads.parameters()):
        parameter.data = random_tensor(*parameter.shape, seed=seed)
    return heads.requires_grad_(False)


def original_logits(heads: torch.nn.ModuleList) -> Tensor:
    """The original's forward pass, stated plainly: [3, N, V]."""
    return torch.stack([head(random_states()) for head in heads])


def as_vllm(name: str, num_layers: int) -> str:
    head, layer, *rest = name.split(".")
    return f"lm_heads.{head}.weight" if int(layer) == num_layers else f"blocks.{head}.layers.{layer}.{rest[-1]}"


def imported(source: Path, output: Path, target: Target) -> Tensor:
    """Logits of the imported heads: [H, 5, V]."""
    record = import_heads(source, output, target)
    assert read_record(output) == record
    assert record.target == target.identity
    return logits_of(load_heads(output / HEADS_FILE, VOCAB), target)


def test_a_target_without_a_chat_template_can_be_imported_for_and_exported_for(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Vicuna's: a template is needed to measure, not to read and write heads."""
    plain = Path(shutil.copytree(target.path, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    (tmp_path / "source").mkdir()
    save_file(original_heads().state_dict(), tmp_path / "source" / HEADS_FILE)
    model = ["--target", str(plain)]
    assert cli.main(["import", str(tmp_path / "source"), str(tmp_path / "ours"), *model]) == 0
    assert cli.main(["export", "--format", "tgi", str(tmp_path / "ours"), str(tmp_path / "theirs"), *model]) == 0
    with pytest.raises(ConfigError, match="no chat template"):
        open_target(str(plain))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("layout", ["pt", "safetensors", "vllm", "modelopt", "file"])
def test_x1_heads_of_the_original_give_the_same_logits(
    target: Target, tmp_path: Path, layout: str, num_layers: int
) -> None:
    heads, source = original_heads(num_layers), tmp_path / "source"
    source.mkdir()
    tensors = heads.state_dict()
    if layout in ("pt", "file"):
        torch.save(tensors, source / "medusa_lm_head.pt")
    elif layout == "safetensors":
        save_file(tensors, source / HEADS_FILE)
    elif layout == "vllm":
        save_file({as_vllm(name, num_layers): t for name, t in tensors.items()}, source / "model.safetensors")
    else:
        save_file({"lm_head.weight": torch.ones(2), "model.norm.weight": torch.ones(1)}, source / "a.safetensors")
        save_file({f"medusa_heads.{name}": t for name, t in tensors.items()}, source / "b.safetensors")
    logits = imported(source / "medusa_lm_head.pt" if layout == "file" else source, tmp_path / "out", target)
    torch.testing.assert_close(logits, original_logits(heads))


def test_x2_blocks_alone_share_the_targets_projection(target: Target, tmp_path: Path) -> None:
    heads, projection = original_heads(), target.load_model(torch.float32).get_output_embeddings()
    (tmp_path / "source").mkdir()
    blocks = {name: t for name, t in heads.state_dict().items() if "linear" in name}
    save_file(blocks, tmp_path / "source" / HEADS_FILE)
    for head in heads:
        head[-1] = projection
    torch.testing.assert_close(imported(tmp_path / "source", tmp_path / "out", target), original_logits(heads))
    assert "original_lm_head" in json.loads((tmp_path / "out/config.json").read_text())


def test_x2_a_shared_projection_that_is_not_the_targets_is_kept(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heads = original_heads()
    shared = heads[0][-1]
    for head in heads:
        head[-1] = shared
    tensors = {as_vllm(n, 1): t for n, t in heads.state_dict().items() if "linear" in n}
    tensors["lm_head.weight"] = shared.weight.data
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    torch.testing.assert_close(imported(tmp_path / "source", tmp_path / "out", target), original_logits(heads))
    assert "not the target's" in caplog.text


def test_blocks_without_a_bias_come_with_one_of_zeros(target: Target, tmp_path: Path) -> None:
    heads = original_heads()
    for head in heads:
        head[0].linear.bias.data.zero_()
    (tmp_path / "source").mkdir()
    tensors = {as_vllm(name, 1): t for name, t in heads.state_dict().items() if "bias" not in name}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    torch.testing.assert_close(imported(tmp_path / "source", tmp_path / "out", target), original_logits(heads))


@pytest.mark.parametrize("kind", ["medusa", HYDRA])
def test_an_export_of_ours_comes_back_as_the_same_drafter(target: Target, tmp_path: Path, kind: str) -> None:
    first = export_heads(target, tmp_path / "export", make_heads(kind=kind, projection=OWN), torch.bfloat16)
    again = import_heads(tmp_path / "export", tmp_path / "out", target)
    assert again.drafter_sha256 == first.drafter_sha256


def write_source(directory: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    directory.mkdir()
    save_file(tensors, directory / HEADS_FILE)
    claims = {} if any("num" in key or key == "medusa" for key in config) else {"medusa_num_heads": 3}
    (directory / "config.json").write_text(json.dumps(claims | config))
    return directory


@pytest.mark.parametrize("config", [{"medusa_num_heads": 2}, {"num_heads": 5}, {"medusa": {"num_medusa_heads": 4}}])
def test_a_configuration_that_lies_about_the_heads_is_a_warning(
    target: Target, tmp_path: Path, config: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    source = write_source(tmp_path / "source", original_heads().state_dict(), **config)
    with caplog.at_level(logging.WARNING):
        record = import_heads(source, tmp_path / "out", target)
    assert "the tensors are of 3; these decide" in caplog.text
    assert record.speculative_config["num_speculative_tokens"] == 3


def test_e13_the_tree_comes_with_the_heads_and_is_checked(target: Target, tmp_path: Path) -> None:
    tensors = original_heads().state_dict()
    source = write_source(tmp_path / "good", tensors, medusa_choices=[[0, 0], [1], [0]])
    import_heads(source, tmp_path / "out", target)
    assert json.loads((tmp_path / "out/config.json").read_text())["medusa_choices"] == [[0], [1], [0, 0]]
    for i, (paths, fault) in enumerate([([[0, 0]], "prefix"), ([[0], [0]], "twice"), ([[12]], "rank 12")]):
        source = write_source(tmp_path / f"bad{i}", tensors, medusa_choices=paths)
        with pytest.raises(ConfigError, match=fault):
            import_heads(source, tmp_path / f"none{i}", target)
        assert not (tmp_path / f"none{i}").exists()


def of_size(hidden: int, vocab: int) -> dict[str, Tensor]:
    return {
        "0.0.linear.weight": random_tensor(hidden, hidden),
        "0.0.linear.bias": random_tensor(hidden),
        "0.1.weight": random_tensor(vocab, hidden),
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"1.0.linear.bias": None}, r"1\.0\.linear\.bias"),
        ({"2.1.weight": None}, r"1\.1\.weight"),
        ({"norm.weight": random_tensor(3)}, r"norm\.weight"),
        ({"token_map": torch.arange(3)}, "reduced vocabulary"),
        ({"lm_heads.0.weight": random_tensor(VOCAB, HIDDEN)}, "10 tensors have 9 meanings"),
        ({"1.0.linear.weight": torch.zeros(0)}, r"1\.0\.linear\.weight"),
    ],
    ids=["no bias", "no projection", "a tensor too many", "reduced vocabulary", "two names", "size 0"],
)
def test_c10_x1_heads_that_are_not_whole_are_refused(
    target: Target, tmp_path: Path, change: dict[str, Tensor | None], fault: str
) -> None:
    tensors = {name: t for name, t in (original_heads().state_dict() | change).items() if t is not None}
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(SpecdistError, match=fault):
        import_heads(source, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("hidden", "vocab"), [(HIDDEN + 1, VOCAB), (HIDDEN, VOCAB + 1)])
def test_heads_of_another_target_are_refused(target: Target, tmp_path: Path, hidden: int, vocab: int) -> None:
    source = write_source(tmp_path / "source", of_size(hidden, vocab))
    with pytest.raises(
        ConfigError, match=f"vocabulary {vocab} and hidden size {hidden}, but tiny-target has 268 and 32"
    ):
        import_heads(source, tmp_path / "out", target)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize("content", [{"0.0.linear.weight": Harmful()}, [random_tensor(2)], {"step": 3}])
def test_c8_a_pickle_of_anything_but_tensors_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ArtifactError, match="state dict"):
        import_heads(tmp_path / "medusa_lm_head.pt", tmp_path / "out", target)
    assert not (tmp_path / "harm").exists()


def test_c8_a_cut_or_missing_file_is_named(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(original_heads().state_dict(), file)
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(ArtifactError, match=r"medusa_lm_head\.pt: cannot be read"):
        import_heads(file, tmp_path / "out", target)
    with pytest.raises(ArtifactError, match="no heads there"):
        import_heads(tmp_path / "nothing", tmp_path / "out", target)


def test_the_command_imports_and_what_it_wrote_can_be_exported(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path / "source", original_heads().state_dict())
    command = ["import", str(source), str(tmp_path / "out"), "--target", str(target.path)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: medusa for tiny-target")
    assert cli.main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", "--format", "original", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / HEADS_FILE)
    assert {name: t.tolist() for name, t in back.items()} == {
        name: t.tolist() for name, t in original_heads().state_dict().items()
    }
