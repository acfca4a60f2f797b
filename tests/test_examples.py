"""Training examples: the generated ids and no others, what is supervised, what is dropped with a count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_tiny_tokenizer
from datasets import Dataset
from distill_factory import INPUTS
from transformers import AutoTokenizer

from specdist.dataset.examples import training_examples
from specdist.dataset.manifest import Tally
from specdist.dataset.render import Renderer
from specdist.dataset.shards import write_shard
from specdist.errors import ArtifactError
from specdist.provenance import read_json, sha256_file, write_json
from specdist.schema import ChatFormat, DatasetManifest, DistillRow
from specdist.training.batches import DraftCollator, schedule

TOKENIZER = make_tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def row(prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str = "length") -> DistillRow:
    sampling = INPUTS.samplings[0]
    return DistillRow("r", "p", 0, 0, "general", list(prompt_ids), list(completion_ids), finish_reason, sampling, 1)


def examples(directory: Path, rows: Sequence[DistillRow], *, max_length: int, shards: int = 1) -> Dataset:
    """Examples of a finished dataset that holds `rows`, with ids in their order."""
    named = [replace(r, id=f"{i:016x}") for i, r in enumerate(rows)]
    directory.mkdir(exist_ok=True)
    paths = [write_shard(directory, named[k::shards], fingerprint="f", engine="e") for k in range(shards)]
    tally = Tally()
    for r in named:
        tally.add(r, "e")
    manifest = DatasetManifest(
        inputs=INPUTS,
        num_asked=len(rows),
        rejected={},
        actions={},
        tokens_per_second=None,
        shards={path.name: sha256_file(path) for path in paths},
        **tally.values(),
    )
    write_json(directory / "manifest.json", manifest.to_json())
    return training_examples(directory, max_length=max_length)


def test_d6_training_sees_the_generated_ids_and_not_a_second_tokenisation(tmp_path: Path):
    letters = TOKENIZER.convert_tokens_to_ids(["t", "h"])
    (merged,) = TOKENIZER("th")["input_ids"]
    assert TOKENIZER.decode(letters) == TOKENIZER.decode([merged]) == "th"
    assert examples(tmp_path, [row([7, 8], [*letters, EOS], "stop")], max_length=16)[0] == {
        "id": f"{0:016x}",
        "input_ids": [7, 8, *letters, EOS],
        "labels": [-100, -100, *letters, EOS],
        "prompt_length": 2,
    }


def test_d6_examples_are_in_the_order_of_ids_however_the_rows_lie_in_shards(tmp_path: Path):
    rows = [row([i, 1], [i + 2, i + 3]) for i in range(9)]
    one = examples(tmp_path / "one", rows, max_length=64)
    four = examples(tmp_path / "four", rows, max_length=64, shards=4)
    assert one.to_list() == four.to_list()
    assert [e["input_ids"] for e in one] == [r.prompt_ids + r.completion_ids for r in rows]
    assert training_examples(tmp_path / "four", max_length=64).to_list() == one.to_list()  # from its file


def test_m2_exactly_the_answer_and_its_end_are_supervised(tmp_path: Path):
    answer = TOKENIZER("answer<|im_end|>")["input_ids"]
    (example,) = examples(tmp_path, [row(TOKENIZER("<|im_start|>user\nq")["input_ids"], answer, "stop")], max_length=64)
    assert TOKENIZER.decode([label for label in example["labels"] if label != -100]) == "answer<|im_end|>"


def test_m1_every_row_has_a_supervised_token(tmp_path: Path):
    found = examples(tmp_path, [row([1] * n, [5] * (1 + n % 3)) for n in range(1, 12)], max_length=64)
    assert len(found) == 11
    assert all(sum(label != -100 for label in example["labels"]) > 0 for example in found)


def test_m3_all_columns_are_cut_alike_and_the_answer_before_the_cut_is_supervised(tmp_path: Path):
    (example,) = examples(tmp_path, [row(range(30), [9] * 70)], max_length=64)
    assert len(example["input_ids"]) == len(example["labels"]) == 64
    assert sum(label != -100 for label in example["labels"]) == 34


def test_d9_eos_is_a_label_only_where_it_was_generated(tmp_path: Path):
    cut_off, stopped = examples(tmp_path, [row([5], [6, 7]), row([5], [6, EOS], "stop")], max_length=8)["labels"]
    assert cut_off == [-100, 6, 7]
    assert stopped == [-100, 6, EOS]


def test_m5_eos_is_supervised_when_it_is_the_padding_id_and_in_the_prompt(tmp_path: Path):
    (labels,) = examples(tmp_path, [row([0, 4, 0], [5, 0], "stop")], max_length=8)["labels"]
    assert labels == [-100, -100, -100, 5, 0]


def test_m7_an_example_ends_in_one_eos_whatever_the_tokenizer_would_add(tmp_path: Path):
    """Nothing is tokenised here, so no add_eos_token can put a second one."""
    found = examples(tmp_path, [row([5], [6, EOS], "stop")] * 2, max_length=8)
    assert [example["input_ids"].count(EOS) for example in found] == [1, 1]


def test_m7_packed_examples_have_one_eos_between_them_whatever_the_tokenizer_would_add(tmp_path: Path):
    """Through all that a packed batch is made of, with a tokenizer that is told to add both ends."""
    (tmp_path / "tokenizer").mkdir()
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    write_json(path, read_json(path) | {"add_bos_token": True, "add_eos_token": True})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    (prompt, other) = Renderer(tokenizer, ChatFormat()).encode_many(
        [[{"role": "user", "content": word}] for word in ("the", "other")]
    )
    found = examples(tmp_path / "data", [row(prompt, [6, EOS], "stop"), row(other, [7, EOS], "stop")], max_length=64)
    collator = DraftCollator(found, tokenizer.pad_token_id, packed=True)
    batch = collator(list(schedule(found, 128)))
    assert batch["input_ids"].tolist() == [[*prompt, 6, EOS, *other, 7, EOS]]
    assert batch["labels"].tolist() == [[*[-100] * len(prompt), 6, EOS, *[-100] * len(other), 7, EOS]]


@pytest.mark.parametrize("header", ["<|im_start|>system\nbe brief<|im_end|>\n", ""])
def test_m11_m14_the_answers_first_token_is_supervised_whatever_stands_before(tmp_path: Path, header: str):
    prompt = TOKENIZER(header + "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = TOKENIZER("there it is")["input_ids"]
    (example,) = examples(tmp_path, [row(prompt, [*answer, EOS], "stop")], max_length=256)
    supervised = [label for label in example["labels"] if label != -100]
    assert TOKENIZER.decode(supervised) == "there it is<|im_end|>"
    assert example["labels"][example["prompt_length"]] == answer[0]


def test_m4_rows_without_a_supervised_token_are_dropped_and_none_left_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    long = [row([9] * 200, [5, 6])] * 8
    with pytest.raises(ArtifactError, match="0 supervised tokens: none of 8 rows"):
        examples(tmp_path / "long", long, max_length=64)
    with pytest.raises(ArtifactError, match="0 supervised tokens"):
        examples(tmp_path / "exact", [row([9] * 64, [5, 6])], max_length=64)
    mixed = [*long, row([9] * 63, [5, 6]), row([9] * 10, [5] * 100)]
    found = examples(tmp_path / "mixed", mixed, max_length=64)
    assert "dropped 8 of 10 rows" in caplog.text
    assert [len(e["input_ids"]) for e in found] == [64, 64]
    assert [sum(label != -100 for label in e["labels"]) for e in found] == [1, 54]
