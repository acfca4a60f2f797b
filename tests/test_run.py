"""The start of a run: what is found before work begins, and who may write where."""

import json
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock
from trl import SFTConfig

from specdist.config import RecipeConfig
from specdist.drafter_config import DraftArguments
from specdist.errors import ArtifactError, ConfigError
from specdist.stages import run as run_stage
from specdist.stages.arguments import parse
from specdist.stages.run import LOCK_FILE, PROVENANCE_FILE, RUN_FILE, start


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def configure(directory: Path, target: Path, *extra: str) -> RecipeConfig:
    arguments = [
        *("--config", "recipes/configs/tiny/draft.yaml", "--target_model", str(target)),
        *("--output_dir", str(directory / "run"), "--data_dir", str(directory / "data")),
        *("--registry", str(directory / "registry"), "--max_prompt_tokens", "400", *extra),
    ]
    return parse(DraftArguments, SFTConfig, default_config="", arguments=arguments)


def begin(directory: Path, target: Path, *extra: str):
    return start(configure(directory, target, *extra), "draft_model", check=lambda _: 1_000_000)


def test_a_full_disk_is_found_before_anything_is_made(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The registry has its own check of the disk; only the run's is meant here
    monkeypatch.setattr(run_stage, "check_writable", lambda root: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 1000, 1000))
    with pytest.raises(ArtifactError, match=r"needs about .* GB of disk and 0\.0 GB are free"):
        begin(tmp_path, tiny_target_dir)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_found_before_anything_is_made(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_stage, "_memory_bytes", lambda device: 1000)
    with pytest.raises(ArtifactError, match="GB of memory on cpu"):
        begin(tmp_path, tiny_target_dir)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context_length", "600"), "context_length 600: tiny-target reads 512 tokens"),
        (("--train_max_new_tokens", "512"), "an answer of 512 tokens leaves no room for a prompt"),
    ],
)
def test_prompts_and_answers_must_fit_the_context(
    tiny_target_dir: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path, tiny_target_dir, *arguments)
    assert not (tmp_path / "run").exists()


def test_the_size_of_the_best_tokens_is_printed_and_refused_where_the_disk_lacks_it(
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    begin(tmp_path, tiny_target_dir, "--top_logprobs", "20").lock.release()
    assert "with the 20 best tokens at each, up to" in caplog.text
    monkeypatch.setattr(run_stage, "check_writable", lambda root: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 10**8, 10**8))
    with pytest.raises(ArtifactError, match=r"needs about .* GB of disk and 0\.1 GB are free"):
        begin(tmp_path / "other", tiny_target_dir, "--top_logprobs", "1000", "--train_max_new_tokens", "400")


def test_a_run_is_recorded_continued_and_refused_to_others(tiny_target_dir: Path, tmp_path: Path) -> None:
    run = begin(tmp_path, tiny_target_dir)
    assert {RUN_FILE, PROVENANCE_FILE, LOCK_FILE} <= {p.name for p in run.directory.iterdir()}
    other_process = FileLock(run.directory / LOCK_FILE)
    run.lock.release()
    with other_process, pytest.raises(ArtifactError, match="another process works in it"):
        begin(tmp_path, tiny_target_dir)
    begin(tmp_path, tiny_target_dir).lock.release()
    begin(tmp_path, tiny_target_dir, "--logging_steps", "9").lock.release()
    with pytest.raises(ArtifactError, match=r"other settings \(top_p: 1.0 → 0.9\)"):
        begin(tmp_path, tiny_target_dir, "--top_p", "0.9")


def test_a_run_goes_on_where_its_target_was_moved_and_is_refused_to_another_target(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    begin(tmp_path, tiny_target_dir).lock.release()
    moved = shutil.copytree(tiny_target_dir, tmp_path / "moved")
    begin(tmp_path, moved).lock.release()
    config = moved / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [0, 5]}))
    with pytest.raises(ArtifactError, match="belongs to a draft_model run for target"):
        begin(tmp_path, moved)


def test_what_a_killed_start_left_is_no_obstacle(tiny_target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / ".tmp-1234-export").mkdir(parents=True)
    (tmp_path / "run" / PROVENANCE_FILE).write_text("{}")
    begin(tmp_path, tiny_target_dir).lock.release()
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_a_folder_with_other_things_in_it_is_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not empty"):
        begin(tmp_path, tiny_target_dir)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_l4_acceptance_on_a_cpu_is_not_measured_in_float16(
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(tmp_path, tiny_target_dir, "--eval_dtype", "float16")
    assert run.config.target.eval_dtype == "float32"
    assert "measured in float32 instead" in caplog.text
