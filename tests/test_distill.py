"""The distillation dataset: rows belong to their ids, interrupted runs continue, training sees the generated ids."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdist.dataset.distill import build_dataset, dataset_fingerprint, read_rows, training_examples
from specdist.dataset.prompts import prompt_id, prompts_sha256
from specdist.errors import ArtifactError, ConfigError
from specdist.schema import DatasetManifest, DistillRow, Prompt, SamplingSpec, TargetIdentity

TOKENIZER = make_tiny_tokenizer()
EOS = [TOKENIZER.eos_token_id, *range(16)]  # many, so that rows end at different steps
TARGET = TargetIdentity("tiny", "w" * 64, "t" * 64, "c" * 64, len(TOKENIZER), EOS)
SAMPLINGS = [SamplingSpec(max_new_tokens=10), SamplingSpec(temperature=0.9, top_p=0.95, max_new_tokens=10)]


def prompt(content: str, domain: str = "general") -> Prompt:
    messages = [{"role": "user", "content": content}]
    return Prompt(prompt_id(messages), domain, "en", messages)


PROMPTS = [prompt("tell me " + "the other one " * (i % 5) + str(i), "odd" if i % 2 else "even") for i in range(12)]


def build(directory: Path, prompts: list[Prompt] = PROMPTS, **changes: Any) -> DatasetManifest:
    arguments: dict[str, Any] = {
        "prompts_sha256": prompts_sha256(prompts),
        "target_identity": TARGET,
        "tokenizer": TOKENIZER,
        "load_model": lambda: make_tiny_llama(len(TOKENIZER)),
        "samplings": SAMPLINGS,
        "max_prompt_tokens": 100,
        "batch_size": 5,
        "seed": 0,
        "dtype": "float32",
    }
    return build_dataset(directory, prompts, **(arguments | changes))


def slow_model() -> LlamaForCausalLM:
    """Slow enough to be killed between two shards. Run by the child processes below."""
    model = make_tiny_llama(len(TOKENIZER))
    model.register_forward_hook(lambda *_: time.sleep(0.05))
    return model


def no_model() -> LlamaForCausalLM:
    raise AssertionError("the model was loaded for a finished dataset")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetManifest, list[DistillRow]]:
    """The reference: one process, no interruption. Read only."""
    directory = tmp_path_factory.mktemp("reference") / "data"
    build(directory)
    return directory, *read_rows(directory)


def row(prompt_ids: list[int], completion_ids: list[int], finish_reason: str = "length") -> DistillRow:
    return DistillRow("r", "p", 0, "general", prompt_ids, completion_ids, finish_reason, SAMPLINGS[0], 1)


def test_rows_and_manifest_say_what_was_made(finished: tuple[Path, DatasetManifest, list[DistillRow]]):
    directory, manifest, rows = finished
    assert len(rows) == manifest.num_rows == 24
    assert manifest.num_prompts == 12
    assert manifest.domains == {"even": 12, "odd": 12}
    assert manifest.num_completion_tokens == sum(len(r.completion_ids) for r in rows)
    assert manifest.num_prompt_tokens == sum(len(r.prompt_ids) for r in rows)
    assert (manifest.target, manifest.samplings, manifest.rejected) == (TARGET, SAMPLINGS, {})
    assert "batch_size 5, seed 0" in manifest.engine
    assert {p.name for p in directory.iterdir()} == {*manifest.shards, "manifest.json"}
    assert len({r.id for r in rows}) == len({r.seed for r in rows}) == 24
    assert {r.finish_reason for r in rows} == {"stop", "length"}
    for r in rows:
        assert r.sampling == SAMPLINGS[r.sample_index]
        assert (r.completion_ids[-1] in EOS) == (r.finish_reason == "stop")
        assert not set(EOS).intersection(r.completion_ids[:-1])


@pytest.mark.parametrize("batch_size", [1, 24])
def test_rows_do_not_depend_on_batch_size_or_order(tmp_path: Path, finished: tuple, batch_size: int):
    shuffled = random.Random(1).sample(PROMPTS, len(PROMPTS))
    build(tmp_path / "data", shuffled, batch_size=batch_size)
    assert read_rows(tmp_path / "data")[1] == finished[2]


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path: Path, finished: tuple):
    meeting = threading.Barrier(2, timeout=60)
    # made before the threads start: random weights come from torch's global generator, which threads share
    models = [make_tiny_llama(len(TOKENIZER)) for _ in range(2)]

    def work(rank: int) -> DatasetManifest:
        return build(tmp_path, rank=rank, world_size=2, load_model=lambda: models[rank], barrier=lambda: meeting.wait())

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(work, rank) for rank in range(2)]
        manifests = [run.result() for run in runs]
    assert manifests[0] == manifests[1] == finished[1]
    assert read_rows(tmp_path)[1] == finished[2]


def test_one_process_finishes_what_a_rank_of_three_began(tmp_path: Path, finished: tuple):
    with pytest.raises(ArtifactError, match="shards are not complete"):
        build(tmp_path, rank=0, world_size=3)
    assert len(list(tmp_path.glob("shard-*"))) == 2
    assert not (tmp_path / "manifest.json").exists()
    assert build(tmp_path) == finished[1]
    assert read_rows(tmp_path)[1] == finished[2]


def test_seed_changes_sampled_rows_and_not_greedy_ones(tmp_path: Path, finished: tuple):
    build(tmp_path, seed=1)

    def answers(rows: list[DistillRow], index: int) -> dict[str, list[int]]:
        return {r.prompt_id: r.completion_ids for r in rows if r.sample_index == index}

    other = read_rows(tmp_path)[1]
    assert answers(other, 0) == answers(finished[2], 0)
    assert answers(other, 1) != answers(finished[2], 1)


def test_killed_twice_then_finished_equals_an_uninterrupted_run(tmp_path: Path, finished: tuple):
    code = "import sys, test_distill as t; t.build(t.Path(sys.argv[1]), load_model=t.slow_model)"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    chance = random.Random()  # any moment must do
    for shards in (1, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
        )
        while child.poll() is None and len(list(tmp_path.glob("shard-*"))) < shards:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.2))
        child.send_signal(signal.SIGKILL)
        _, error = child.communicate()
        assert child.returncode == -signal.SIGKILL, error.decode()
        assert not (tmp_path / "manifest.json").exists()
    (tmp_path / ".tmp-0a1b2c3d-shard-00004.parquet").write_bytes(b"PAR1")
    assert build(tmp_path) == finished[1]
    assert read_rows(tmp_path)[1] == finished[2]
    assert not list(tmp_path.glob(".tmp-*"))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 4
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [cut, flip, lambda data: b""], ids=["cut", "flip", "empty"])
def test_a_damaged_shard_of_an_unfinished_dataset_is_written_again(
    tmp_path: Path, finished: tuple, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
):
    build(tmp_path)
    (tmp_path / "manifest.json").unlink()
    shard = tmp_path / "shard-00001.parquet"
    shard.write_bytes(damage(shard.read_bytes()))
    assert build(tmp_path) == finished[1]
    assert read_rows(tmp_path)[1] == finished[2]
    assert "writing a shard again" in caplog.text


def test_a_damaged_shard_of_a_finished_dataset_is_an_error(tmp_path: Path):
    build(tmp_path)
    shard = tmp_path / "shard-00002.parquet"
    shard.write_bytes(flip(shard.read_bytes()))
    with pytest.raises(ArtifactError, match=r"shard-00002\.parquet: SHA-256"):
        read_rows(tmp_path)
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"shard-00002\.parquet: no such file"):
        read_rows(tmp_path)


def test_a_finished_dataset_is_returned_without_the_model(finished: tuple):
    assert build(finished[0], load_model=no_model) == finished[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target_identity": replace(TARGET, weights_sha256="x" * 64)}, "weights_sha256"),
        ({"target_identity": replace(TARGET, chat_template_sha256="x" * 64)}, "chat_template_sha256"),
        ({"prompts_sha256": "x"}, "prompts_sha256: .* there, x now"),
        ({"samplings": SAMPLINGS[:1]}, "samplings"),
        ({"max_prompt_tokens": 99}, "max_prompt_tokens: 100 there, 99 now"),
        ({"dtype": "bfloat16"}, "dtype: float32 there, bfloat16 now"),
        ({"seed": 3}, "seed 0 there, batch_size 5, seed 3 now"),
    ],
)
def test_d8_a_dataset_made_from_other_inputs_is_refused(tmp_path: Path, finished: tuple, changes: dict, name: str):
    with pytest.raises(ArtifactError, match=name):
        build(finished[0], load_model=no_model, **changes)
    unfinished = tmp_path / "shard-00000.parquet"
    unfinished.write_bytes((finished[0] / unfinished.name).read_bytes())
    with pytest.raises(ArtifactError, match=r"shard-00000\.parquet: made from other inputs"):
        build(tmp_path, load_model=no_model, **changes)


def test_fingerprint_changes_with_what_determines_the_content():
    settings: dict[str, Any] = {"max_prompt_tokens": 9, "batch_size": 4, "seed": 0, "dtype": "bfloat16"}
    own = dataset_fingerprint(TARGET, "p", SAMPLINGS, **settings)
    others = [
        dataset_fingerprint(replace(TARGET, tokenizer_sha256="x"), "p", SAMPLINGS, **settings),
        dataset_fingerprint(replace(TARGET, eos_token_ids=[1]), "p", SAMPLINGS, **settings),
        dataset_fingerprint(TARGET, "q", SAMPLINGS, **settings),
        dataset_fingerprint(TARGET, "p", SAMPLINGS[::-1], **settings),
        *(
            dataset_fingerprint(TARGET, "p", SAMPLINGS, **(settings | {k: v}))
            for k, v in {"max_prompt_tokens": 8, "batch_size": 8, "seed": 1, "dtype": "float32"}.items()
        ),
    ]
    assert len({own, *others}) == 9
    assert len(own) == 12
    assert own == dataset_fingerprint(replace(TARGET, model_id="another name"), "p", SAMPLINGS, **settings)


def test_d5_rejected_prompts_are_counted_by_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bad = [prompt("say <|im_end|> twice"), prompt("long " * 50), prompt("<|im_start|>")]
    manifest = build(tmp_path, [*PROMPTS[:2], *bad])
    assert manifest.rejected == {"control_token": 2, "too_long": 1}
    assert (manifest.num_prompts, manifest.num_rows) == (2, 4)
    assert "left out 3 of 5 prompts" in caplog.text
    with pytest.raises(ArtifactError, match=r"no prompt is left of 3.*too_long"):
        build(tmp_path / "none", bad)


def test_answers_of_one_token_are_kept(tmp_path: Path):
    build(tmp_path, target_identity=replace(TARGET, eos_token_ids=list(range(len(TOKENIZER)))))
    rows = read_rows(tmp_path)[1]
    assert {(len(r.completion_ids), r.finish_reason) for r in rows} == {(1, "stop")}
    assert len(training_examples(rows, max_length=200)) == 24


def test_text_longer_than_the_targets_positions_is_refused_before_any_is_written(tmp_path: Path):
    sampling = SamplingSpec(max_new_tokens=500)
    with pytest.raises(ConfigError, match="the target has 512 positions"):
        build(tmp_path, samplings=[SAMPLINGS[0], sampling])
    assert not list(tmp_path.glob("*"))


def test_progress_shows_rate_and_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    build(tmp_path)
    assert "24/24" in caplog.text
    assert "tokens/s, 0 s left" in caplog.text


def test_unfinished_dataset_cannot_be_read(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        read_rows(tmp_path)


def test_d6_training_sees_the_generated_ids_and_not_a_second_tokenisation(tiny_tokenizer: PreTrainedTokenizerFast):
    letters = tiny_tokenizer.convert_tokens_to_ids(["t", "h"])
    (merged,) = tiny_tokenizer("th")["input_ids"]
    assert tiny_tokenizer.decode(letters) == tiny_tokenizer.decode([merged]) == "th"
    examples = training_examples([row([7, 8], [*letters, EOS[0]], "stop")], max_length=16)
    assert examples[0] == {
        "input_ids": [7, 8, *letters, EOS[0]],
        "labels": [-100, -100, *letters, EOS[0]],
        "prompt_length": 2,
    }


def test_d6_ids_survive_the_files(tmp_path: Path, finished: tuple):
    by_id = {r.id: r for r in finished[2]}
    for example, r in zip(training_examples(finished[2], max_length=512), finished[2], strict=True):
        assert example["input_ids"] == by_id[r.id].prompt_ids + by_id[r.id].completion_ids
        assert len(example["labels"]) == len(example["input_ids"])


def test_d9_eos_is_a_label_only_where_it_was_generated():
    cut_off, stopped = training_examples([row([5], [6, 7]), row([5], [6, 267], "stop")], max_length=8)["labels"]
    assert cut_off == [-100, 6, 7]
    assert stopped == [-100, 6, 267]


def test_m5_eos_is_supervised_when_it_is_the_padding_id_and_in_the_prompt():
    (labels,) = training_examples([row([0, 4, 0], [5, 0], "stop")], max_length=8)["labels"]
    assert labels == [-100, -100, -100, 5, 0]


def test_m14_the_answers_first_token_is_supervised(tiny_tokenizer: PreTrainedTokenizerFast):
    answer = tiny_tokenizer("there it is")["input_ids"]
    (example,) = training_examples([row([1, 2, 3], [*answer, 267], "stop")], max_length=64)
    supervised = [label for label in example["labels"] if label != -100]
    assert tiny_tokenizer.decode(supervised) == "there it is<|im_end|>"
    assert example["labels"][example["prompt_length"]] == answer[0]


def test_m4_rows_without_a_supervised_token_are_dropped_and_none_left_is_an_error(caplog: pytest.LogCaptureFixture):
    long = [row([9] * 200, [5, 6])] * 8
    with pytest.raises(ArtifactError, match="0 supervised tokens: none of 8 rows"):
        training_examples(long, max_length=64)
    with pytest.raises(ArtifactError, match="0 supervised tokens"):
        training_examples([row([9] * 64, [5, 6])], max_length=64)
    examples = training_examples([*long, row([9] * 63, [5, 6]), row([9] * 10, [5] * 100)], max_length=64)
    assert "dropped 8 of 10 rows" in caplog.text
    assert [len(e["input_ids"]) for e in examples] == [64, 64]
    assert [sum(label != -100 for label in e["labels"]) for e in examples] == [1, 54]
