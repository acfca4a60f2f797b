"""Sources of prompts: only a newline ends a row, Parquet and datasets give the same rows, the missing is named."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdist.dataset.conversation import parse_row
from specdist.dataset.prompts import prompt_line
from specdist.dataset.sources import Source, open_source
from specdist.errors import ArtifactError
from specdist.prompt_policy import PromptPolicy
from specdist.provenance import sha256_file, write_json
from specdist.schema import Prompt

ROWS = [
    {"id": "a", "domain": "math", "messages": [{"role": "user", "content": "one"}]},
    {"id": "b", "domain": None, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared datasets go below the test's own directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, *rows: object, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(end.join([*(json.dumps(row, ensure_ascii=False) for row in rows), ""]).encode())
    return path


def prompts(source: Source) -> list[Prompt]:
    return [parse_row(raw, PromptPolicy(), source.domain).prompt for _, raw in source.rows()]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("final", [True, False])
def test_d3_only_newline_ends_a_row(tmp_path: Path, end: str, bom: bytes, final: bool) -> None:
    content = "a\u2028b\u0085c\u2029d\x0b \ufeffé e\u0301"
    file = write(tmp_path / "p.jsonl", {"prompt": content}, {"prompt": "two"}, end=end)
    data = file.read_bytes()
    assert "\u2028".encode() in data
    file.write_bytes(bom + (data if final else data.rstrip()))
    source = open_source(str(file))
    assert source.num_rows == 2
    first, second = prompts(source)
    assert first.messages[0]["content"].encode() == content.encode()
    assert second.messages[0]["content"] == "two"
    file.write_bytes(prompt_line(first) + b"\n")
    assert prompts(open_source(str(file))) == [first]


def test_blank_lines_are_skipped_and_counted_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\n{"prompt":"a"}\n \r\n{"prompt":"b"}')
    source = open_source(str(file))
    assert [number for number, _ in source.rows()] == [2, 4]
    assert (source.num_rows, source.unit, source.domain) == (4, "line", "general")
    assert open_source(str(file), "coding").domain == "coding"


def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path) -> None:
    expected = prompts(open_source(str(write(tmp_path / "p.jsonl", *ROWS))))
    file = tmp_path / "rows"  # known by its content, not by its name
    pq.write_table(pa.Table.from_pylist([{**row, "score": 0.5} for row in ROWS]), file)
    source = open_source(str(file))
    assert prompts(source) == expected
    assert (source.num_rows, source.unit, source.sha256) == (2, "row", sha256_file(file))


def test_a_dataset_directory_gives_the_rows_of_its_split(tmp_path: Path) -> None:
    expected = prompts(open_source(str(write(tmp_path / "chats" / "train.jsonl", *ROWS)), "chats"))
    write(tmp_path / "chats" / "test.jsonl", ROWS[1])
    source = open_source(str(tmp_path / "chats"))
    assert prompts(source) == expected
    assert (source.num_rows, source.unit, source.domain) == (2, "row", "chats")
    test = open_source(f"{tmp_path / 'chats'}:test")
    assert prompts(test) == expected[1:]
    assert test.sha256 != source.sha256
    with pytest.raises(ArtifactError, match=r"chats:nope: not loadable as a dataset \(split 'nope'\).*test"):
        open_source(f"{tmp_path / 'chats'}:nope")
    write(tmp_path / "chats" / "train.jsonl", ROWS[0])
    assert open_source(str(tmp_path / "chats")).sha256 != source.sha256


def test_a_saved_dataset_gives_its_rows(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list([{"prompt": "one", "text": "x"}, {"prompt": "two", "text": "y"}])
    saved.save_to_disk(tmp_path / "saved")
    assert [p.messages[0]["content"] for p in prompts(open_source(str(tmp_path / "saved")))] == ["one", "two"]
    datasets.DatasetDict({"held": saved}).save_to_disk(tmp_path / "splits")
    assert len(prompts(open_source(f"{tmp_path / 'splits'}:held"))) == 2


def test_columns_without_a_conversation_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "t.parquet")
    with pytest.raises(
        ArtifactError, match=r"t\.parquet: columns text, label; expected one of messages, conversations"
    ):
        open_source(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "none.jsonl: no such file or directory"),
        ("no/such/place", "no/such/place: no such file or directory"),
        (
            "nobody/nothing:dev",
            r"nobody/nothing:dev: no such file, and not loadable as a dataset \(split 'dev'\): .*Hub",
        ),
        ("nobody/nothing@1a2b:main:dev", r"nothing@1a2b:main:dev: no such file, and not loadable"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        open_source(name)


def test_a_path_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "org" / "name:train", {"prompt": "a"})
    monkeypatch.chdir(tmp_path)
    assert [p.messages[0]["content"] for p in prompts(open_source("org/name:train"))] == ["a"]


def test_hub_name_revision_configuration_and_split_reach_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"prompt": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("org/chats@v2:main:dev")
    assert asked == [(("org/chats", "main"), {"split": "dev", "revision": "v2"})]
    assert source.domain == "chats"
    open_source("org/chats")
    assert asked[1] == (("org/chats", None), {"split": "train", "revision": None})


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ArtifactError, match=r"t\.parquet: not readable as Parquet"):
        open_source(str(tmp_path / "t.parquet"))


def test_a_prompt_set_is_checked_against_its_manifest(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.jsonl", {"prompt": "one"})
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        open_source(str(tmp_path))
    manifest = {"num_prompts": 1, "prompts_sha256": sha256_file(file), "domains": {}, "languages": {}}
    write_json(tmp_path / "manifest.json", {"schema_version": 1, **manifest})
    assert len(prompts(open_source(str(tmp_path)))) == 1
    write(file, {"prompt": "two"})
    with pytest.raises(ArtifactError, match="SHA-256"):
        open_source(str(tmp_path))
    file.unlink()
    with pytest.raises(ArtifactError, match=r"prompts\.jsonl: no such file"):
        open_source(str(tmp_path))
