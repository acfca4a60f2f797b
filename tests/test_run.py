"""The start of a run: what is found before work begins, and who may write where."""

import logging
import shutil
import subprocess
import sys
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
from specdist.stages.process import asked_processes
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


def test_g8_an_mlflow_that_cannot_be_told_is_found_before_training(tiny_target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in place of a directory")
    for uri, message in {
        "foo://bar": r"mlflow_tracking_uri 'foo://bar': MLflow knows no foo://",
        f"sqlite:///{tmp_path}/file/mlflow.db": f"{tmp_path}/file: the registry cannot be written",
        f"file://{tmp_path}/file/mlruns": f"{tmp_path}/file/mlruns: the registry cannot be written",
    }.items():
        with pytest.raises((ConfigError, ArtifactError), match=message):
            begin(tmp_path, tiny_target_dir, "--mlflow_tracking_uri", uri)
    assert not (tmp_path / "run").exists()
    for uri in ("http://127.0.0.1:9", f"sqlite:///{tmp_path}/team/mlflow.db"):
        begin(tmp_path, tiny_target_dir, "--mlflow_tracking_uri", uri).lock.release()


def test_l1_fewer_processes_than_asked_for_are_refused(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, tiny_target_dir)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were asked for .* 1 run together.*cpu_2proc\.yaml"):
        start(config, "draft_model", check=lambda _: 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["accelerate", "launch", "--cpu", "--num_processes", "2", "recipe.py"], 2),
        (["accelerate-launch", "--num-processes=3", "recipe.py"], 3),
        (["accelerate", "launch", "recipe.py"], 1),
        (["python", "recipe.py", "--num_processes", "2"], 1),
    ],
)
def test_l1_what_was_asked_of_a_launcher_is_read_from_its_command_line(
    command: list[str], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen([*code, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()  # it runs, under the name that it has from now on
        found = asked_processes(launcher.pid)
        launcher.communicate(b"\n")
    assert found == asked


def test_l4_acceptance_on_a_cpu_is_not_measured_in_float16(
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(tmp_path, tiny_target_dir, "--eval_dtype", "float16")
    assert run.config.target.eval_dtype == "float32"
    assert "measured in float32 instead" in caplog.text
