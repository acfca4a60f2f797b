"""Damaged and foreign files: gate, registry and import refuse each with the file's name and the reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heads_factory import HIDDEN, VOCAB, export_heads, make_heads
from report_factory import make_report
from safetensors.torch import load_file, save_file

from specdist.drafter_config import OWN
from specdist.drafters.heads_file import HEADS_FILE
from specdist.drafters.prune import prune_layers
from specdist.errors import ArtifactError, SpecdistError
from specdist.export.draft_model import export_draft_model
from specdist.export.imported import import_heads
from specdist.export_record import EXPORT_FILE, read_record, write_record
from specdist.gate import GatePolicy, decide
from specdist.registry.store import Registry
from specdist.safetensors_file import read_header
from specdist.schema import EvalReport, TargetIdentity
from specdist.stages.release import export_faults
from specdist.target import Target, open_target


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return make_report(gammas=(3,), settings=("greedy",), per_domain=10)


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_config(file: Path, **keys: object) -> None:
    """Change keys; None leaves one out."""
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if keys.get(key, 0) is not None}))


def first(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = first(tensors)
    return {f"{key}.renamed" if key == name else key: tensor for key, tensor in tensors.items()}


def halve(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: t.bfloat16() if key == first(tensors) else t for key, t in tensors.items()}


# What is done to a weights file (w) and its configuration (c), and words of the reason
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str, str]] = {
    "truncated": (lambda w, c: w.write_bytes(w.read_bytes()[:-3]), "w", r"truncated: \d+ bytes, its header asks for"),
    "cut in its header": (lambda w, c: w.write_bytes(w.read_bytes()[:40]), "w", "its header is cut"),
    "empty": (lambda w, c: w.write_bytes(b""), "w", r"its header is cut \(0 bytes"),
    "padded": (lambda w, c: w.write_bytes(w.read_bytes() + bytes(8)), "w", r"padded: \d+ bytes"),
    "a tensor renamed": (lambda w, c: change_tensors(w, rename), "w", r"tensors missing: .*unknown tensors: .*renamed"),
    "a dtype changed": (lambda w, c: change_tensors(w, halve), "w", r"is BF16 \[.*expected F32 \["),
    "another model's": (lambda w, c: save_file({"x": torch.ones(3)}, w), "w", r"unknown tensors: \['x'\]"),
    "a page of text": (lambda w, c: w.write_text("<html>not found</html>"), "w", "no safetensors file"),
    "missing": (lambda w, c: w.unlink(), "w", "no such file"),
    "a key missing": (lambda w, c: change_config(c, vocab_size=None), "c", r"missing keys \['vocab_size'\]"),
    "a key unknown": (lambda w, c: change_config(c, vocabulary=9), "c", r"unknown keys \['vocabulary'\]"),
    "another value": (lambda w, c: change_config(c, vocab_size=9), "c", "values differ"),
    "no JSON": (lambda w, c: c.write_text("{"), "c", "not readable as JSON"),
}


def export_draft(target: Target, directory: Path) -> None:
    model = prune_layers(target.load_model(torch.float32), [1])
    export_draft_model(model, target, directory, dtype=torch.float32, num_speculative_tokens=3, checkpoint_step=7)


def by_gate(export: Path, identity: TargetIdentity, report: EvalReport) -> None:
    decision = decide(
        replace(report, target=identity),
        None,
        GatePolicy(),
        report_sha256="f",
        champion_version=None,
        export_faults=export_faults(export, identity, replace(report, target=identity)),
    )
    assert decision.verdict == "reject"
    raise ArtifactError(decision.reason)


def by_registry(export: Path, root: Path) -> None:
    try:
        Registry(root, "draft").publish(export, files={}, tags={}, expected_champion=None)
    finally:
        assert not root.exists(), "refused before anything is written"


@pytest.mark.parametrize("damage", DAMAGES)
def test_x1_x5_c8_a_damaged_export_is_refused_alike(
    target: Target, report: EvalReport, tmp_path: Path, damage: str
) -> None:
    export_draft(target, tmp_path / "draft")
    export_heads(target, tmp_path / "heads", make_heads(projection=OWN))
    apply, where, reason = DAMAGES[damage]
    for kind, weights in (("draft", "model.safetensors"), ("heads", HEADS_FILE)):
        directory = tmp_path / kind
        apply(directory / weights, directory / "config.json")
        name = weights if where == "w" else "config.json"
        callers = [
            lambda d=directory: by_gate(d, target.identity, report),
            lambda d=directory: by_registry(d, tmp_path / "registry"),
        ]
        if kind == "heads":
            callers.append(lambda d=directory: import_heads(d, tmp_path / "out", target))
        for refuse in callers:
            with pytest.raises(ArtifactError, match=f"{directory / name}: .*{reason}"):
                refuse()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model-00002.safetensors", "pytorch_model.bin", "extra/draft.gguf"])
def test_x8_weights_that_were_not_exported_are_refused(
    target: Target, report: EvalReport, tmp_path: Path, name: str
) -> None:
    export = tmp_path / "export"
    export_heads(target, export, make_heads(projection=OWN))
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).write_bytes(b"weights of something else")
    for refuse in (
        lambda: by_gate(export, target.identity, report),
        lambda: by_registry(export, tmp_path / "registry"),
        lambda: import_heads(export, tmp_path / "out", target),
    ):
        with pytest.raises(ArtifactError, match=f"{name}: foreign to the export"):
            refuse()


def test_g9_an_export_other_than_the_one_measured_is_rejected(
    target: Target, report: EvalReport, tmp_path: Path
) -> None:
    record = export_heads(target, tmp_path / "export", make_heads(projection=OWN))
    measured = replace(report, target=target.identity, drafter_sha256=record.drafter_sha256)
    assert export_faults(tmp_path / "export", target.identity, measured) == []
    [other] = export_faults(tmp_path / "export", target.identity, replace(measured, drafter_sha256="0" * 64))
    assert "not the drafter that was measured" in other
    another = replace(target.identity, weights_sha256="9" * 64)
    [foreign] = export_faults(tmp_path / "export", another, measured)
    assert "not the run's target" in foreign


# Import of heads that come with no record


def foreign_source(directory: Path) -> Path:
    directory.mkdir()
    tensors = {name: tensor.clone() for name, tensor in make_heads(projection=OWN).state_dict().items()}
    save_file(tensors, directory / HEADS_FILE)
    (directory / "config.json").write_text(json.dumps({"model_type": "medusa", "medusa_num_heads": 3}))
    return directory


WITHOUT_RECORD = {
    "truncated": "truncated",
    "cut in its header": "its header is cut",
    "empty": "its header is cut",
    "padded": "padded",
    "a tensor renamed": "renamed",
    "a dtype changed": r"dtypes .*torch\.bfloat16 at",
    "another model's": "no tensor named like",
    "a page of text": "no safetensors file",
    "a key unknown": r"config\.json: unknown keys \['vocabulary'\]; did you mean 'vocab_size'",
    "no JSON": r"config\.json: not readable as JSON",
}


@pytest.mark.parametrize("damage", WITHOUT_RECORD)
def test_x1_x5_c8_damaged_heads_of_others_are_refused(target: Target, tmp_path: Path, damage: str) -> None:
    source = foreign_source(tmp_path / "source")
    import_heads(source, tmp_path / "whole", target)
    DAMAGES[damage][0](source / HEADS_FILE, source / "config.json")
    with pytest.raises(SpecdistError, match=f"{source}.*{WITHOUT_RECORD[damage]}"):
        import_heads(source, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_x5_heads_of_others_without_their_number_are_refused(target: Target, tmp_path: Path) -> None:
    source = foreign_source(tmp_path / "source")
    change_config(source / "config.json", medusa_num_heads=None)
    with pytest.raises(ArtifactError, match=r"config\.json: missing key 'medusa_num_heads'"):
        import_heads(source, tmp_path / "out", target)


def test_heads_of_whole_numbers_are_refused(target: Target, tmp_path: Path) -> None:
    source = foreign_source(tmp_path / "source")
    change_tensors(source / HEADS_FILE, lambda tensors: {name: t.to(torch.int8) for name, t in tensors.items()})
    with pytest.raises(ArtifactError, match=r"torch\.int8"):
        import_heads(source, tmp_path / "out", target)


# The header


def test_the_header_says_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(0), "d": torch.tensor(1),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    expected = {"a": "F32 [2, 3]", "b": "BF16 [4]", "c": "F32 [0]", "d": "I64 []"}
    assert read_header(tmp_path / "x.safetensors") == expected


@pytest.mark.parametrize(
    "offsets", [([0, 8], [4, 12]), ([0, 8], [9, 17]), ([1, 9], [9, 17]), ([0, 8], [8, 12])],
    ids=["overlap", "hole", "start", "size"],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, offsets: tuple[list[int], list[int]]) -> None:
    header = {n: {"dtype": "F32", "shape": [2], "data_offsets": o} for n, o in zip("ab", offsets, strict=True)}
    text = json.dumps(header).encode()
    data = bytes(max(end for _, end in offsets))
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ArtifactError, match="contradicts itself"):
        read_header(tmp_path / "x.safetensors")


def test_the_record_follows_what_is_exported_again(target: Target, tmp_path: Path) -> None:
    record = export_heads(target, tmp_path / "export", make_heads(projection=OWN))
    assert record.tensors[HEADS_FILE]["0.0.linear.weight"] == f"F32 [{HIDDEN}, {HIDDEN}]"
    assert record.tensors[HEADS_FILE]["2.1.weight"] == f"F32 [{VOCAB}, {HIDDEN}]"
    assert "vocab_size" in record.config_keys
    change_config(tmp_path / "export/config.json", vocab_size=None)
    write_record(tmp_path / "export", record)
    assert "vocab_size" not in read_record(tmp_path / "export").config_keys
    assert (tmp_path / "export" / EXPORT_FILE).is_file()
