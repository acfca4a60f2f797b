"""`specdist data show` and `validate`: what a person sees, and that each kind of fault is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from distill_factory import EOS, INPUTS, PROMPTS, TOKENIZER, build

from specdist.cli import main
from specdist.dataset.manifest import read_rows
from specdist.dataset.shards import Shard, shard_paths, write_shard
from specdist.dataset.show import row_lines
from specdist.provenance import sha256_file
from specdist.schema import DistillRow

Change = Callable[[DistillRow], DistillRow]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    build(tmp_path / "data", PROMPTS[:3], replace(INPUTS, num_top_logprobs=0))
    return tmp_path / "data"


def damage(directory: Path, change: Change) -> None:
    """Change one row and make the shard's SHA-256 fit, so that only the check of rows can find it."""
    path = shard_paths(directory)[0]
    first, *rest = Shard(path).rows()
    shard = Shard(path)
    path.unlink()
    new = write_shard(directory, [change(first), *rest], fingerprint=shard.fingerprint, engine=shard.engine)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["shards"][path.name]
    manifest["shards"][new.name] = sha256_file(new)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_validate_accepts_a_whole_dataset(dataset: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "validate", str(dataset)]) == 0
    assert "valid, 9 rows in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda r: replace(r, id="0" * 16), "id is not the hash"),
        (lambda r: replace(r, seed=1), "seed is not that of the id"),
        (lambda r: replace(r, turn=1), "id is not the hash"),
        (lambda r: replace(r, sample_index=7), "sampling is not in the manifest"),
        (lambda r: replace(r, prompt_ids=[1] * 101), "longer than max_prompt_tokens"),
        (lambda r: replace(r, completion_ids=[]), "completion is empty"),
        (lambda r: replace(r, completion_ids=[99999] * 10, finish_reason="length"), "outside the vocabulary"),
        (lambda r: replace(r, completion_ids=[EOS[0], 40], finish_reason="length"), "end of text before the end"),
        (lambda r: replace(r, completion_ids=[40] * 10, finish_reason="stop"), "finish_reason does not fit"),
        (lambda r: replace(r, completion_ids=[40] * 3, finish_reason="length"), "cut off before max_new_tokens"),
        (lambda r: replace(r, top_ids=[1], top_logprobs=[-1.0], tail_mass=[0.5]), "do not fit the completion"),
        (lambda r: replace(r, domain="other"), "domains is not that of the rows"),
    ],
)
def test_validate_finds_each_kind_of_fault(
    dataset: Path, change: Change, fault: str, capsys: pytest.CaptureFixture[str]
):
    damage(dataset, change)
    assert main(["data", "validate", str(dataset)]) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert "manifest's rows_sha256 is not that of the rows" in error


def test_validate_finds_files_that_were_altered_lost_or_added(dataset: Path, capsys: pytest.CaptureFixture[str]):
    first, second, *_ = shard_paths(dataset)
    (dataset / "shard-added.parquet").write_bytes(first.read_bytes())
    first.write_bytes(first.read_bytes()[:-9])
    second.unlink()
    assert main(["data", "validate", str(dataset)]) == 2
    error = capsys.readouterr().err
    for fault in ("shard's SHA-256", "cannot be read", "is missing", "is not in the manifest"):
        assert fault in error


def test_show_prints_manifest_and_rows(dataset: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "show", str(dataset), "--rows", "2", "--target", str(tiny_target_dir)]) == 0
    out = capsys.readouterr().out
    assert "9 of 9 asked for" in out
    assert out.count("<|im_start|>assistant\n‹") == 2
    assert main(["data", "show", str(dataset), "--rows", "1"]) == 0  # its target is not to be found: ids are shown
    assert "name the target with --target" in capsys.readouterr().out


def test_supervised_tokens_are_coloured_and_no_control_character_reaches_the_terminal(dataset: Path):
    row = replace(read_rows(dataset)[1][0], completion_ids=[*TOKENIZER("a\x1b[2J")["input_ids"], EOS[0]])
    text = row_lines(row, TOKENIZER, colour=True)[1]
    prompt, _, answer = text.rpartition("assistant\n")
    assert answer.startswith("\033[32ma\\x1b[2J\033[35m<|im_end|>")
    assert "\033[32m" not in prompt
