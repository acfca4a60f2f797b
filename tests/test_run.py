"""The start of a run: what is found before work begins, and who may write where."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as NS
from typing import NamedTuple

import pytest
import torch
from conftest import bound_by_permissions
from distill_factory import PROMPTS, build
from filelock import FileLock
from transformers import PreTrainedModel
from trl import SFTConfig

from specdist.config import RecipeConfig
from specdist.dataset.examples import training_examples
from specdist.dataset.features import target_states
from specdist.drafter_config import DraftArguments, TrainedSize
from specdist.errors import ArtifactError, ConfigError
from specdist.stages import plan
from specdist.stages import start as start_stage
from specdist.stages.arguments import parse
from specdist.stages.data import TrainingData
from specdist.stages.distillation import _states
from specdist.stages.process import asked_processes
from specdist.stages.run import run_recipe
from specdist.stages.start import LOCK_FILE, PROVENANCE_FILE, RUN_FILE, start

SIZE = TrainedSize.whole(250_000)


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
    return start(configure(directory, target, *extra), "draft_model", check=lambda _: SIZE)


def test_a_full_disk_is_found_before_anything_is_made(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The registry has its own check of the disk; only the run's is meant here
    monkeypatch.setattr(start_stage, "check_writable", lambda root: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 1000, 1000))
    with pytest.raises(ArtifactError, match=r"needs about .* GB of disk more .* and 0\.0 GB are free"):
        begin(tmp_path, tiny_target_dir)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_found_before_anything_is_made(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_device_bytes", lambda device: 1000)
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
    monkeypatch.setattr(start_stage, "check_writable", lambda root: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 10**8, 10**8))
    with pytest.raises(ArtifactError, match=r"needs about .* GB of disk more .* and 0\.1 GB are free"):
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
        start(config, "draft_model", check=lambda _: SIZE)
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


def test_a_killed_run_needs_only_what_it_has_not_written(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ("--objective", "forward_kl", "--train_max_new_tokens", "400")
    run = begin(tmp_path, tiny_target_dir, *extra)
    run.lock.release()
    needed = sum(plan._disk_needs(run, SIZE).values())
    written = sum(plan._disk_needs(run, SIZE)[directory] for directory in (run.directory, run.registry.root))
    (run.checkpoints / "checkpoint-1").mkdir(parents=True)
    with (run.checkpoints / "checkpoint-1" / "optimizer.pt").open("wb") as file:
        file.truncate(plan._disk_needs(run, SIZE)[run.directory])
    (run.directory / "gate.json").touch()
    monkeypatch.setattr(start_stage, "check_writable", lambda root: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, needed - written))
    begin(tmp_path, tiny_target_dir, *extra).lock.release()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, needed - written - 1))
    with pytest.raises(ArtifactError, match="cache_target_states: false"):
        begin(tmp_path, tiny_target_dir, *extra)


def test_a_finished_dataset_needs_the_states_of_its_tokens_that_are_not_there(
    tmp_path: Path, tiny_model: PreTrainedModel
) -> None:
    def needed() -> int:
        return plan._dataset_bytes(tmp_path, tokens=10_000, text=7, state=32 * 4)

    assert needed() == 10_000 * (7 + 32 * 4)
    manifest = build(tmp_path, PROMPTS[:3])
    assert needed() == manifest.num_completion_tokens * 32 * 4
    examples = training_examples(tmp_path, max_length=500)
    target_states(tmp_path / "states-1", examples, lambda: tiny_model)
    assert needed() == 0


def test_each_disk_is_checked_for_what_goes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.stat("/proc").st_dev != tmp_path.stat().st_dev
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 0, 10 if path == Path("/proc") else 20))
    plan._check_disks({tmp_path / "run": 12, tmp_path / "registry": 8, Path("/proc"): 10})
    for needs in ({tmp_path / "run": 12, tmp_path / "registry": 9}, {tmp_path: 1, Path("/proc"): 11}):
        with pytest.raises(ArtifactError, match=str(list(needs)[-1])):
            plan._check_disks(needs)


def test_memory_of_training_is_shared_by_the_processes_that_shard_it(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path, tiny_target_dir)
    run.lock.release()
    run, whole = replace(run, state=NS(num_processes=8)), TrainedSize.whole(8 * 10**9)
    assert plan.training_bytes(run, whole) == 16 * 8 * 10**9
    adapters = TrainedSize(total=8 * 10**9, learned=10**7, held_bytes=4 * 10**9)
    assert plan.training_bytes(run, adapters) == 4 * 10**9 + 12 * 10**7
    run.config.training.deepspeed_plugin = NS(zero_stage=2)
    assert plan.training_bytes(run, whole) == (4 + 12 // 8) * 8 * 10**9 + 4 * 10**9
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert plan.training_bytes(run, whole) == 16 * 10**9


@pytest.mark.parametrize(("version", "stage", "name"), [("1", 0, "FSDP1"), ("2", 3, "ZeRO-3")])
def test_sharding_that_hides_the_projection_is_refused_before_anything_is_made(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, stage: int, name: str
) -> None:
    config = configure(tmp_path, tiny_target_dir)
    config.training.deepspeed_plugin = NS(zero_stage=stage)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ConfigError, match=f"{name} hides the rows"):
        start(config, "draft_model", check=lambda _: SIZE)
    assert not (tmp_path / "run").exists()


def test_runs_side_by_side_take_turns_at_the_targets_states(tiny_target_dir: Path, tmp_path: Path) -> None:
    run = begin(tmp_path, tiny_target_dir)
    run.lock.release()
    dataset = tmp_path / "dataset"
    data = TrainingData(dataset, build(dataset, PROMPTS[:3]), training_examples(dataset, max_length=500))
    writes, may_end = threading.Event(), threading.Event()

    def slow() -> PreTrainedModel:
        writes.set()
        assert may_end.wait(60)
        return run.target_model("float32")

    def must_not_load() -> PreTrainedModel:
        raise AssertionError("the states are there, or another run is at work on them")

    first, second = (threading.Thread(target=_states, args=(run, data, load, 500)) for load in (slow, must_not_load))
    first.start()
    assert writes.wait(60)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    may_end.set()
    for thread in (first, second):
        thread.join(60)
    assert [path.name for path in dataset.rglob("*.safetensors")] == ["00000.safetensors"]


def test_states_that_lie_in_a_dataset_for_reading_alone_are_read(tiny_target_dir: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are below one that only its user may enter
        Path(directory).chmod(0o755)
        run = begin(Path(directory), tiny_target_dir)
        dataset = Path(directory) / "dataset"
        data = TrainingData(dataset, build(dataset, PROMPTS[:3]), training_examples(dataset, max_length=500))
        made = _states(run, data, lambda: run.target_model("float32"), 500)
        next(dataset.glob("*.lock")).unlink()
        dataset.chmod(0o555)
        with bound_by_permissions():
            assert torch.equal(_states(run, data, pytest.fail, 500).of(0), made.of(0))
        dataset.chmod(0o755)


@pytest.mark.parametrize(("number", "is_told"), [(errno.ENOSPC, True), (errno.EACCES, True), (errno.EIO, False)])
def test_a_full_disk_ends_a_recipe_with_what_to_do(
    caplog: pytest.LogCaptureFixture, number: int, is_told: bool
) -> None:
    def write() -> int:
        raise OSError(number, os.strerror(number), "checkpoint-7/optimizer.pt")

    with pytest.raises(SystemExit if is_told else OSError) as ended:
        run_recipe(write)
    assert ("'checkpoint-7/optimizer.pt'; make room" in caplog.text) is is_told
    assert not is_told or ended.value.code == 2
