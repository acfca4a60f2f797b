"""The distillation dataset: rows belong to their ids, interrupted runs continue, conversations go turn by turn."""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from distill_factory import INPUTS, NUM_ROWS, PROMPTS, SAMPLED, TARGET, TOKENIZER, build, engine, prompt, tiny_engine
from warm_process import PROCESSES

from specdist.dataset.manifest import check_target, dataset_fingerprint, read_rows, texts_sha256
from specdist.dataset.plan import RowIds, slots
from specdist.dataset.render import Renderer, history
from specdist.dataset.shards import Shard, shard_paths, write_shard
from specdist.dataset.validate import validate_dataset
from specdist.errors import ArtifactError
from specdist.generation.engine import Answer, Engine, Request
from specdist.generation.hf import TransformersEngine
from specdist.provenance import sha256_json
from specdist.schema import ChatFormat, DatasetManifest, DistillRow, SamplingSpec


def slow_engine() -> Engine:
    """Slow enough to be killed between two shards. Run by the child processes below."""
    model = make_tiny_llama(len(TOKENIZER))
    model.register_forward_hook(lambda *_: time.sleep(0.02))
    return engine(model, batch_rows=3)


def no_engine() -> Engine:
    raise AssertionError("the engine was made for a finished dataset")


def content(manifest: DatasetManifest) -> DatasetManifest:
    """A manifest without what depends on how the rows were written."""
    return replace(manifest, shards={}, tokens_per_second=None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetManifest, list[DistillRow]]:
    """The reference: one process, no interruption. Read only."""
    directory = tmp_path_factory.mktemp("reference") / "data"
    build(directory)
    return directory, *read_rows(directory)


def test_rows_and_manifest_say_what_was_made(finished: tuple[Path, DatasetManifest, list[DistillRow]]):
    directory, manifest, rows = finished
    assert len(rows) == manifest.num_rows == manifest.num_asked == NUM_ROWS
    assert manifest.num_prompts == 12
    assert manifest.domains == {"even": 15, "odd": 15, "chat": 12}
    assert manifest.num_completion_tokens == manifest.num_supervised_tokens == sum(len(r.completion_ids) for r in rows)
    assert manifest.num_prompt_tokens == sum(len(r.prompt_ids) for r in rows)
    assert (manifest.inputs, manifest.rejected, manifest.actions) == (INPUTS, {}, {})
    assert list(manifest.engines.values()) == [NUM_ROWS]
    assert next(iter(manifest.engines)).startswith("transformers 5.")
    assert manifest.num_truncated == manifest.finish_reasons["length"]
    assert manifest.tokens_per_second > 0
    assert {p.name for p in directory.iterdir()} == {*manifest.shards, "manifest.json", "plan.arrow"}
    assert len({r.id for r in rows}) == len({r.seed for r in rows}) == NUM_ROWS
    assert {(r.sampling, r.sample_index) for r in rows} == set(slots(INPUTS.samplings))
    assert {r.finish_reason for r in rows} == {"stop", "length"}
    assert validate_dataset(directory)[1].lines() == []


def test_samples_of_one_sampling_differ(finished: tuple[Path, DatasetManifest, list[DistillRow]]):
    answers = [
        {r.prompt_id: r.completion_ids for r in finished[2] if r.sample_index == i and r.turn == 0} for i in (0, 1)
    ]
    sampled = [r for r in finished[2] if r.sampling == SAMPLED and r.turn == 0]
    assert len(sampled) == 24
    assert answers[0] != answers[1]


def test_later_turns_are_written_on_the_targets_own_history(finished: tuple[Path, DatasetManifest, list[DistillRow]]):
    renderer = Renderer(TOKENIZER, ChatFormat())
    rows = {(r.prompt_id, r.sampling, r.sample_index, r.turn): r for r in finished[2]}
    for conversation in PROMPTS[-2:]:
        for sampling, index in slots(INPUTS.samplings):
            first, second = (rows[conversation.id, sampling, index, turn] for turn in (0, 1))
            answer = renderer.answer_text(first.completion_ids)
            assert second.prompt_ids == renderer.encode(history(conversation.messages, [answer], 1))
            assert len(second.prompt_ids) > len(first.prompt_ids)


@pytest.mark.parametrize("batch_rows", [1, 32])
def test_rows_do_not_depend_on_batch_size_or_order(tmp_path: Path, finished: tuple, batch_rows: int):
    shuffled = random.Random(1).sample(PROMPTS, len(PROMPTS))
    manifest = build(
        tmp_path, shuffled, make_engine=lambda: engine(make_tiny_llama(len(TOKENIZER)), batch_rows=batch_rows)
    )
    assert read_rows(tmp_path)[1] == finished[2]
    assert manifest.rows_sha256 == finished[1].rows_sha256


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path: Path, finished: tuple, late: float):
    """Nor on a process that looks `late` seconds after the other at what is written: it shares out the same rows."""
    meeting = threading.Barrier(2, timeout=60)
    # made before the threads start: random weights come from torch's global generator, which threads share
    engines = [engine(make_tiny_llama(len(TOKENIZER))) for _ in range(2)]

    def meet(rank: int) -> None:
        meeting.wait()
        time.sleep(late * rank)

    def work(rank: int) -> DatasetManifest:
        with torch.inference_mode():  # which is set by thread
            return build(
                tmp_path, rank=rank, world_size=2, make_engine=lambda: engines[rank], barrier=lambda: meet(rank)
            )

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(work, rank) for rank in range(2)]
        manifests = [run.result() for run in runs]
    assert manifests[0] == manifests[1]
    assert content(manifests[0]) == content(finished[1])
    assert read_rows(tmp_path)[1] == finished[2]


def test_one_process_finishes_what_a_rank_of_three_began(tmp_path: Path, finished: tuple):
    with pytest.raises(ArtifactError, match="24 conversations have no rows"):
        build(tmp_path, rank=0, world_size=3)
    assert not (tmp_path / "manifest.json").exists()
    assert content(build(tmp_path)) == content(finished[1])
    assert read_rows(tmp_path)[1] == finished[2]


def test_seed_changes_sampled_rows_and_not_greedy_ones(tmp_path: Path, finished: tuple):
    build(tmp_path, inputs=replace(INPUTS, seed=1))

    def answers(rows: list[DistillRow], greedy: bool) -> dict[tuple[str, int, int], list[int]]:
        return {(r.prompt_id, r.turn, r.sample_index): r.completion_ids for r in rows if r.sampling.is_greedy == greedy}

    other = read_rows(tmp_path)[1]
    assert answers(other, True) == answers(finished[2], True)
    assert answers(other, False) != answers(finished[2], False)


def start_and_kill(directory: Path, is_time: Callable[[], bool]) -> bool:
    """Write the dataset in a process of its own and kill it when `is_time`; whether it was killed before its end."""
    child = PROCESSES.Process(target=build, args=(directory,), kwargs={"make_engine": slow_engine, "shard_rows": 2})
    child.start()
    while child.is_alive() and not is_time():
        time.sleep(0.002)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def test_killed_twice_then_finished_equals_an_uninterrupted_run(tmp_path: Path, finished: tuple):
    chance = random.Random()  # any moment must do
    for shards in (1, 3):
        assert start_and_kill(tmp_path, lambda n=shards: len(shard_paths(tmp_path)) >= n and chance.random() < 0.05)
        assert not (tmp_path / "manifest.json").exists()
    (tmp_path / ".tmp-0a1b2c3d-shard-00004.parquet").write_bytes(b"PAR1")
    (tmp_path / "progress-7.json").write_text("{}")  # of a run of more processes
    assert content(build(tmp_path)) == content(finished[1])
    assert read_rows(tmp_path)[1] == finished[2]
    assert not [*tmp_path.glob(".tmp-*"), *tmp_path.glob("progress-*")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_runs_killed_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, finished: tuple):
    moments = []
    for number in range(20):
        directory = tmp_path / str(number)
        delay = random.uniform(0.0, 2.5)
        began: list[float] = []

        def is_time(directory: Path = directory, delay: float = delay, began: list[float] = began) -> bool:
            """So long after the directory appears: what precedes it only imports."""
            if directory.exists() and not began:
                began.append(time.monotonic())
            return bool(began) and time.monotonic() - began[0] > delay

        killed = start_and_kill(directory, is_time)
        moments.append((killed, len(shard_paths(directory))))
        if killed and (paths := shard_paths(directory)) and number % 3 == 0:
            paths[-1].write_bytes(cut(paths[-1].read_bytes()))  # as if the disk had lost the shard's end
        assert content(build(directory)) == content(finished[1])
        assert read_rows(directory)[1] == finished[2]
        assert validate_dataset(directory)[1].lines() == []
    assert sum(killed for killed, _ in moments) >= 15
    assert len({shards for _, shards in moments}) >= 5, moments


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 4
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


def test_no_change_of_a_shard_goes_unseen(tmp_path: Path, finished: tuple):
    original = shard_paths(finished[0])[0]
    data, rows = original.read_bytes(), list(Shard(original).rows())
    shard = tmp_path / original.name
    for position in range(0, len(data), 97):
        shard.write_bytes(data[:position] + bytes([data[position] ^ 255]) + data[position + 1 :])
        with pytest.raises(ArtifactError, match="not a readable shard"):
            Shard(shard).verify()
    shard.write_bytes(data)
    Shard(shard).verify()
    assert list(Shard(shard).rows()) == rows


@pytest.mark.parametrize("damage", [cut, flip, lambda data: b""], ids=["cut", "flip", "empty"])
def test_a_damaged_shard_of_an_unfinished_dataset_is_written_again(
    tmp_path: Path, finished: tuple, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
):
    build(tmp_path)
    (tmp_path / "manifest.json").unlink()
    shard = shard_paths(tmp_path)[1]
    shard.write_bytes(damage(shard.read_bytes()))
    assert content(build(tmp_path)) == content(finished[1])
    assert read_rows(tmp_path)[1] == finished[2]
    assert "its rows are written again" in caplog.text


def test_rows_that_two_shards_hold_are_kept_once(tmp_path: Path, finished: tuple, caplog: pytest.LogCaptureFixture):
    build(tmp_path)
    (tmp_path / "manifest.json").unlink()
    shard = Shard(shard_paths(tmp_path)[0])
    write_shard(tmp_path, list(shard.rows())[:1], fingerprint=shard.fingerprint, engine="other 1")
    assert content(build(tmp_path)) == content(finished[1])
    assert "another shard holds" in caplog.text


def test_a_damaged_shard_of_a_finished_dataset_is_an_error(tmp_path: Path):
    build(tmp_path)
    shard = shard_paths(tmp_path)[2]
    shard.write_bytes(flip(shard.read_bytes()))
    with pytest.raises(ArtifactError, match=rf"{shard.name}: SHA-256"):
        read_rows(tmp_path)
    shard.unlink()
    with pytest.raises(ArtifactError, match=rf"{shard.name}: no such file"):
        read_rows(tmp_path)


def test_a_finished_dataset_is_returned_without_the_engine(finished: tuple):
    assert build(finished[0], make_engine=no_engine) == finished[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target": replace(TARGET, weights_sha256="x" * 64)}, "weights_sha256"),
        ({"target": replace(TARGET, chat_template_sha256="x" * 64)}, "chat_template_sha256"),
        ({"prompts_sha256": "x"}, "prompts_sha256: .* there, x now"),
        ({"samplings": INPUTS.samplings[:1]}, "samplings"),
        ({"max_prompt_tokens": 99}, "max_prompt_tokens: 100 there, 99 now"),
        ({"dtype": "bfloat16"}, "dtype: float32 there, bfloat16 now"),
        ({"seed": 3}, "seed: 0 there, 3 now"),
        ({"chat_format": ChatFormat("be brief")}, "chat_format: .*be brief"),
        ({"engine": "vllm"}, "engine: transformers there, vllm now"),
        ({"num_top_logprobs": 2}, "num_top_logprobs: 0 there, 2 now"),
    ],
)
def test_d8_a_dataset_made_from_other_inputs_is_refused(tmp_path: Path, finished: tuple, changes: dict, name: str):
    inputs = replace(INPUTS, **changes)
    assert dataset_fingerprint(inputs) != dataset_fingerprint(INPUTS)
    with pytest.raises(ArtifactError, match=name):
        build(finished[0], inputs=inputs, make_engine=no_engine)
    unfinished = tmp_path / shard_paths(finished[0])[0].name
    unfinished.write_bytes((finished[0] / unfinished.name).read_bytes())
    with pytest.raises(ArtifactError, match=rf"{unfinished.name}: made from other inputs"):
        build(tmp_path, inputs=inputs, make_engine=no_engine)


def test_d8_training_refuses_the_dataset_of_another_target_or_template(finished: tuple):
    directory, manifest, _ = finished
    check_target(directory, manifest, replace(TARGET, model_id="another name"), ChatFormat())
    with pytest.raises(ArtifactError, match="weights_sha256"):
        check_target(directory, manifest, replace(TARGET, weights_sha256="x" * 64), ChatFormat())
    with pytest.raises(ArtifactError, match="chat_format"):
        check_target(directory, manifest, TARGET, ChatFormat(system_prompt="x"))


def test_the_fingerprint_does_not_depend_on_the_targets_name():
    renamed = replace(INPUTS, target=replace(TARGET, model_id="another name"))
    assert dataset_fingerprint(renamed) == dataset_fingerprint(INPUTS)
    assert len(dataset_fingerprint(INPUTS)) == 12


GREEDY = replace(INPUTS, samplings=[SamplingSpec(max_new_tokens=10)])


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"target": replace(TARGET, weights_sha256="x" * 64)}, True),
        ({"seed": 3, "samplings": [SamplingSpec(top_p=0.9, max_new_tokens=10)]}, True),
        ({"samplings": [SamplingSpec(max_new_tokens=96)]}, False),
        ({"samplings": [SAMPLED]}, False),
        ({"chat_format": ChatFormat("be brief")}, False),
        ({"prompts_sha256": "x"}, False),
        ({"dtype": "bfloat16"}, False),
    ],
    ids=["target", "what greedy does not read", "length", "sampling", "system prompt", "prompts", "dtype"],
)
def test_evaluations_share_what_determines_their_texts(change: dict, same: bool):
    assert (texts_sha256(replace(GREEDY, **change)) == texts_sha256(GREEDY)) == same


def test_sampled_texts_depend_on_the_seed():
    sampled = replace(INPUTS, samplings=[SAMPLED])
    assert texts_sha256(replace(sampled, seed=3)) != texts_sha256(sampled)


def test_min_p_counts_in_hashes_only_where_it_is_on():
    """So that datasets from before it keep their fingerprint, their rows' ids and their digests."""
    values = INPUTS.to_json()
    del values["target"]["model_id"]
    for sampling in values["samplings"]:
        del sampling["min_p"]
    assert dataset_fingerprint(INPUTS) == sha256_json(values)[:12]
    assert RowIds([SAMPLED], 0)("p", 0, SAMPLED, 0) == "8484f908d47d5982"
    on = replace(SAMPLED, min_p=0.1)
    assert dataset_fingerprint(replace(INPUTS, samplings=[on])) != dataset_fingerprint(
        replace(INPUTS, samplings=[SAMPLED])
    )
    assert RowIds([on], 0)("p", 0, on, 0) != RowIds([SAMPLED], 0)("p", 0, SAMPLED, 0)


def test_d5_rejected_prompts_are_counted_by_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bad = [prompt("say <|im_end|> twice"), prompt("long " * 50), prompt("<|im_start|>")]
    manifest = build(tmp_path, [*PROMPTS[:2], *bad])
    assert manifest.rejected == {"control_token": 2, "too_long": 1}
    assert (manifest.num_prompts, manifest.num_rows, manifest.num_asked) == (2, 6, 15)
    assert "left out 3 of 5 prompts" in caplog.text
    with pytest.raises(ArtifactError, match=r"no prompt is left of 3.*too_long"):
        build(tmp_path / "none", bad)


def test_prompts_that_leave_no_room_in_the_context_are_dropped_with_a_count(tmp_path: Path):
    short = replace(INPUTS, context_length=50)
    manifest = build(tmp_path, inputs=short)
    assert manifest.rejected["context_length"] > 0
    assert all(len(r.prompt_ids) + 10 <= 50 for r in read_rows(tmp_path)[1])


def test_a_later_turn_that_is_too_long_ends_the_conversation_with_a_count(tmp_path: Path):
    manifest = build(tmp_path, [prompt("a", "b" * 100, "c"), prompt("d", "e")])
    assert manifest.rejected == {"later_turn": 6}
    assert (manifest.num_rows, manifest.num_asked) == (9, 15)
    assert validate_dataset(tmp_path)[1].lines() == []


def test_answers_of_one_token_are_kept(tmp_path: Path):
    everything = replace(INPUTS, target=replace(TARGET, eos_token_ids=list(range(len(TOKENIZER)))))
    build(tmp_path, inputs=everything, make_engine=lambda: tiny_engine(eos=everything.target.eos_token_ids))
    assert {(len(r.completion_ids), r.finish_reason) for r in read_rows(tmp_path)[1]} == {(1, "stop")}


def test_what_an_engine_finished_before_it_failed_is_kept(tmp_path: Path):
    class Failing(TransformersEngine):
        def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
            yield from islice(super().answers(next_request), 5)
            raise ArtifactError("no server has answered")

    with pytest.raises(ArtifactError, match="no server has answered"):
        build(tmp_path, PROMPTS[:10], make_engine=lambda: tiny_engine(Failing), shard_rows=100)
    assert sum(Shard(path).columns(["id"]).num_rows for path in shard_paths(tmp_path)) == 5


def test_an_engine_with_a_smaller_context_is_refused_before_any_row(tmp_path: Path):
    class Small:
        name, context_length = "small 1", 100

        def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
            raise AssertionError("asked")

        def close(self) -> None:
            pass

    with pytest.raises(ArtifactError, match="small 1: reads 100 tokens, the dataset's context_length is 512"):
        build(tmp_path, make_engine=Small)
    assert not shard_paths(tmp_path)


def test_best_tokens_are_those_of_the_target_and_add_up_to_one(tmp_path: Path):
    inputs = replace(INPUTS, num_top_logprobs=4)
    model = make_tiny_llama(len(TOKENIZER))
    build(tmp_path, inputs=inputs, make_engine=lambda: engine(model, num_top_logprobs=4))
    _, rows = read_rows(tmp_path)
    assert validate_dataset(tmp_path)[1].lines() == []
    for row in rows[::7]:
        n = len(row.completion_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([row.prompt_ids + row.completion_ids[:-1]])).logits[0, -n:]
        best = logits.float().log_softmax(-1).topk(4)
        assert row.top_ids == best.indices.flatten().tolist()
        torch.testing.assert_close(torch.tensor(row.top_logprobs), best.values.flatten(), atol=0.01, rtol=0.01)
        total = torch.tensor(row.top_logprobs).exp().reshape(n, 4).sum(-1) + torch.tensor(row.tail_mass)
        torch.testing.assert_close(total, torch.ones(n), atol=1e-3, rtol=0)


def test_progress_shows_rate_and_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    build(tmp_path)
    assert "36/36" in caplog.text
    assert "tokens/s, 0 s left" in caplog.text


def test_unfinished_dataset_cannot_be_read(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        read_rows(tmp_path)
