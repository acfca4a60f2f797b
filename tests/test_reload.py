"""The export is read again in a fresh process; the gate rejects where that has other tensors or other drafts."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from heads_factory import export_heads
from report_factory import make_reload, make_report
from safetensors.torch import load_file, save_file

from specdist.export.draft_model import export_draft_model
from specdist.export_record import ExportRecord, write_record
from specdist.gate import GatePolicy, decide
from specdist.schema import GateCheck
from specdist.schema_reload import ExportReading, Reload
from specdist.stages import reload
from specdist.stages.named_drafter import DrafterChoice, open_drafter
from specdist.stages.reload import ReloadRequest, read_export, reload_export
from specdist.target import Target, open_target

PROMPTS, GAMMA = [[5, 6, 7, 8], [9, 10, 11]], 3


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return open_target(str(tiny_target_dir))


def reading(target: Target, export: Path) -> ExportReading:
    """What this process reads."""
    opened = open_drafter(DrafterChoice(str(export), num_speculative_tokens=GAMMA), target, torch.float32, "cpu")
    assert opened.drafter is not None
    return read_export(opened.model, opened.drafter, PROMPTS, target.identity.eos_token_ids, GAMMA)


def request_of(target: Target, export: Path) -> ReloadRequest:
    return ReloadRequest(str(export), str(target.path), "float32", "cpu", None, 1, GAMMA, PROMPTS)


def judged(made: Reload | None) -> GateCheck:
    report = replace(make_report(gammas=(3,), settings=("greedy",), per_domain=10), reload=made)
    decision = decide(report, None, GatePolicy(), report_sha256="f" * 64, champion_version=None)
    check = next(check for check in decision.checks if check.name == "fresh_process")
    assert (decision.verdict == "promote") is check.passed
    return check


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (None, "missing: a fresh process has to read"),
        (replace(make_reload(), fresh=None, fault="no such tensor"), "cannot read the export: no such tensor"),
        (make_reload(tensors_sha256="0" * 64), "has other tensors (30) than were measured (30)"),
        (make_reload(num_tensors=29), "has other tensors (29) than were measured (30)"),
        (
            make_reload([[1, 2, 3], [4, 5, 9]]),
            "in block 1 a fresh process drafts [4, 5, 9], and [4, 5, 6] was measured",
        ),
        (make_reload([[1, 2, 3]]), "in block 1 a fresh process drafts None"),
        (Reload(*[ExportReading(30, "f" * 64, [])] * 2), "nothing was drafted"),
    ],
)
def test_g9_what_a_fresh_process_does_not_read_alike_is_rejected(made: Reload | None, reason: str) -> None:
    check = judged(made)
    assert not check.passed
    assert check.on_failure == "reject"
    assert reason in check.reason


def test_a_fresh_process_that_reads_the_same_passes() -> None:
    assert "the same 30 tensors and drafts the same 6 tokens" in judged(make_reload()).reason


@pytest.mark.parametrize("change", ["another", "missing"])
def test_x5_a_tensor_that_is_another_or_missing_is_found_by_a_fresh_process(
    target: Target, tmp_path: Path, change: str
) -> None:
    export = tmp_path / "export"
    draft = make_tiny_llama(target.identity.vocab_size, layers=1)
    export_draft_model(draft, target, export, dtype=torch.float32, num_speculative_tokens=GAMMA, checkpoint_step=1)
    measured, weights = reading(target, export), load_file(export / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "another":
        weights[name] += 1.0
    else:
        del weights[name]
    save_file(weights, export / "model.safetensors", metadata={"format": "pt"})
    write_record(export, read_record_unchecked(export))

    made = reload_export(measured, request_of(target, export))
    if change == "another":
        assert made.fresh is not None, made.fault
        assert made.fresh.num_tensors == measured.num_tensors
    wanted = "other tensors" if change == "another" else f"its files lack 1 tensors, such as ['{name}']"
    assert wanted in judged(made).reason


def read_record_unchecked(export: Path) -> ExportRecord:
    """The record as it stands beside files that were changed."""
    return ExportRecord.from_json(json.loads((export / "export.json").read_text()))


def test_the_fresh_process_reads_what_was_measured_or_says_why_not(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its main function, here: another process is started above, and by every recipe."""
    export_heads(target, tmp_path / "heads")
    request = request_of(target, tmp_path / "heads")
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request.to_json())))
    assert reload.main() == 0
    fresh = ExportReading.from_json(json.loads(capsys.readouterr().out))
    assert fresh == reading(target, tmp_path / "heads")
    assert sum(map(len, fresh.drafts)) > 10

    (tmp_path / "heads" / "medusa_lm_head.safetensors").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request.to_json())))
    assert reload.main() == 2
    assert "no such file" in capsys.readouterr().err
