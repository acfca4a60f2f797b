"""Reading prompts: malformed rows are named, contents survive to the byte, the shipped prompts are split soundly."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from specdist.dataset.prompts import load_prompts, prompt_id, prompts_sha256
from specdist.errors import ArtifactError, ConfigError
from specdist.provenance import sha256_file, write_json
from specdist.schema import Prompt

SHIPPED = Path(__file__).parents[1] / "data" / "prompts"


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def write(path: Path, *rows: object, end: str = "\n") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(end.join([*lines, ""]).encode())
    return path


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["assistant", "user", "assistant"], ["messages[0] is assistant", "expected user"]),
        (["user", "user", "assistant"], ["messages[0] is user", "messages[1] is user", "expected assistant"]),
        (["system", "assistant", "user"], ["messages[0] is system", "messages[1] is assistant"]),
        (["user", "system", "user"], ["messages[1] is system"]),
        (["user", "assistant"], ["messages[1]", "last", "is assistant"]),
        (["system"], ["messages[0]", "last", "is system"]),
    ],
)
def test_d1_role_order_is_reported_with_file_line_id_and_indices(tmp_path: Path, roles: list[str], words: list[str]):
    bad = {"id": "conversation-7", "messages": [{"role": role, "content": "hi"} for role in roles]}
    file = write(tmp_path / "p.jsonl", {"messages": user("fine")}, bad)
    with pytest.raises(ArtifactError) as caught:
        load_prompts(file)
    for word in [str(file), "line 2", "conversation-7", *words]:
        assert word in str(caught.value)


def test_d1_a_bad_row_is_dropped_with_a_count_when_not_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bad = {"messages": [{"role": "assistant", "content": "hi"}]}
    file = write(tmp_path / "p.jsonl", bad, *({"messages": user(f"question {i}")} for i in range(5)))
    assert len(load_prompts(file, strict=False)) == 5
    assert "1 of 6 rows" in caplog.text


def test_system_and_several_turns_are_accepted(tmp_path: Path):
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": role} for role in roles]
    assert load_prompts(write(tmp_path / "p.jsonl", {"messages": messages}))[0].messages == messages


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("final", [True, False])
def test_d3_only_newline_ends_a_row(tmp_path: Path, end: str, bom: bytes, final: bool):
    content = "a\u2028b\u0085c\u2029d\x0b \ufeffé e\u0301"
    file = write(tmp_path / "p.jsonl", {"messages": user(content)}, {"prompt": "two"}, end=end)
    data = file.read_bytes()
    assert "\u2028".encode() in data
    file.write_bytes(bom + (data if final else data.rstrip()))
    first, second = load_prompts(file)
    assert first.messages == user(content)
    again = write(tmp_path / "again.jsonl", {"id": first.id, "messages": first.messages})
    assert load_prompts(again)[0].messages[0]["content"].encode() == content.encode()
    assert second.messages == user("two")


@pytest.mark.parametrize("field", ['"messages":[{"role":"user","content":"bad \\udcb2 char"}]', '"prompt":"\\ud800"'])
def test_d4_lone_surrogate_is_a_row_error(tmp_path: Path, field: str):
    file = write(tmp_path / "p.jsonl", '{"id":"x1",' + field + "}", {"prompt": "fine"})
    with pytest.raises(ArtifactError, match=r"line 1, id 'x1': messages\[0\]: lone surrogate U\+D"):
        load_prompts(file)
    assert [p.messages for p in load_prompts(file, strict=False)] == [user("fine")]


def test_a_surrogate_pair_is_one_character(tmp_path: Path):
    assert load_prompts(write(tmp_path / "p.jsonl", '{"prompt":"\\ud83d\\ude00"}'))[0].messages == user("\U0001f600")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "cut', "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", 'expected either "messages" or "prompt"'),
        ({"prompt": "a", "messages": user("a")}, 'expected either "messages" or "prompt"'),
        ({"messages": []}, "a list that is not empty"),
        ({"messages": "hello"}, "a list that is not empty"),
        ({"messages": ["hello"]}, "an object with role and content"),
        ({"messages": [{"role": "user"}]}, "an object with role and content"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role 'human'"),
        ({"messages": user("  \n ")}, "content is empty"),
        ({"prompt": ["part"]}, "content is list, expected text"),
        ({"prompt": "a", "domain": 3}, "domain: expected a string"),
        ("[" * 100_000, "nested too deeply"),
        ({"prompt": "a", "id": ""}, "id: expected a string"),
    ],
)
def test_malformed_row_is_named(tmp_path: Path, row: object, reason: str):
    file = write(tmp_path / "p.jsonl", {"prompt": "fine"}, "", row)
    with pytest.raises(ArtifactError, match=f"line 3, id .*{re.escape(reason)}"):
        load_prompts(file)


def test_invalid_utf8_is_a_row_error(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt":"ok"}\n{"prompt":"\xff"}\n')
    with pytest.raises(ArtifactError, match=r"line 2.*not UTF-8"):
        load_prompts(file)


def test_all_bad_rows_come_in_one_error_that_shows_ten(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", *(["{"] * 13), {"prompt": "fine"})
    with pytest.raises(ArtifactError, match="13 of 14 rows") as caught:
        load_prompts(file)
    assert str(caught.value).count("\n  line ") == 10
    assert "and 3 more" in str(caught.value)


def test_missing_fields_and_duplicates(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    rows = [{"prompt": "one"}, {"messages": user(" one\n")}, {"prompt": "two", "id": 7, "domain": "math"}]
    first, second = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert first == Prompt(prompt_id(user("one")), "general", "und", user("one"))
    assert (second.id, second.domain) == ("7", "math")
    assert "dropped 1 exact duplicates" in caplog.text


def test_one_id_for_different_messages_is_an_error(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"})
    with pytest.raises(ArtifactError, match="line 2, id 'a': id is that of line 1"):
        load_prompts(file)


def test_prompt_id_ignores_unicode_form_and_outer_space_only():
    assert prompt_id(user("e\u0301 ")) == prompt_id(user("\u00e9"))
    assert prompt_id(user("a  b")) != prompt_id(user("a b"))
    assert re.fullmatch("[0-9a-f]{16}", prompt_id(user("a")))


def test_prompts_sha256_depends_on_what_is_said_and_not_on_order(tmp_path: Path):
    one, two = load_prompts(write(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two"}))
    assert prompts_sha256([one, two]) == prompts_sha256([two, one]) != prompts_sha256([one])


def test_limit_covers_every_domain_and_larger_limits_contain_smaller():
    everything = load_prompts(SHIPPED / "train")
    few, more = (load_prompts(SHIPPED / "train", limit=n) for n in (60, 100))
    assert Counter(p.domain for p in few) == dict.fromkeys({p.domain for p in everything}, 5)
    assert {p.id for p in few} < {p.id for p in more}
    assert load_prompts(SHIPPED / "train", limit=10**6) == everything


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_out_of_range(limit: int):
    with pytest.raises(ConfigError, match="expected 1 or more"):
        load_prompts(SHIPPED / "train", limit=limit)


def test_missing_empty_and_altered_files_are_named(tmp_path: Path):
    with pytest.raises(ArtifactError, match="no such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ArtifactError, match="no usable prompt"):
        load_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        load_prompts(tmp_path)
    file = write(tmp_path / "prompts.jsonl", {"prompt": "one"})
    write_json(tmp_path / "manifest.json", {"prompts_sha256": sha256_file(file)})
    assert len(load_prompts(tmp_path)) == 1
    write(file, {"prompt": "two"})
    with pytest.raises(ArtifactError, match="SHA-256"):
        load_prompts(tmp_path)


@pytest.mark.parametrize("side", ["train", "eval"])
def test_shipped_manifest_and_split(side: str):
    prompts = load_prompts(SHIPPED / side)
    manifest = json.loads((SHIPPED / side / "manifest.json").read_text())
    assert len(prompts) >= {"train": 640, "eval": 210}[side]
    assert manifest["num_prompts"] == len(prompts)
    assert manifest["licence"] == "Apache-2.0"
    assert manifest["domains"] == Counter(p.domain for p in prompts)
    assert manifest["languages"] == Counter(p.language for p in prompts)
    assert len(manifest["domains"]) == 12
    for prompt in prompts:
        assert prompt.id == prompt_id(prompt.messages)
        assert ("eval" if int(prompt.id[:8], 16) % 100 < 25 else "train") == side


def words(prompt: Prompt) -> list[str]:
    """Words, or characters where the script writes no spaces."""
    found = re.findall(r"\w+", prompt.messages[0]["content"].casefold())
    return list("".join(found)) if prompt.language in ("zh", "ja") else found


def shingles(prompt: Prompt) -> set[str]:
    """Runs of 5 words (8 characters in Chinese and Japanese)."""
    size, units = (8 if prompt.language in ("zh", "ja") else 5), words(prompt)
    return {" ".join(units[i : i + size]) for i in range(max(1, len(units) - size + 1))}


def test_no_near_duplicate_crosses_the_split():
    """Jaccard of shingles below 0.1: two prompts of 30 words that share a run of ten have 6/46 = 0.13.

    The closest pair has 0.023. Nor do two prompts begin alike: one template filled twice would leak its answer's form.
    """
    train, evaluation = (load_prompts(SHIPPED / side) for side in ("train", "eval"))
    sets = [shingles(prompt) for prompt in train]
    holders: dict[str, list[int]] = defaultdict(list)
    for i, members in enumerate(sets):
        for shingle in members:
            holders[shingle].append(i)
    for prompt in evaluation:
        own = shingles(prompt)
        for i, common in Counter(i for shingle in own for i in holders.get(shingle, [])).items():
            assert common / (len(own) + len(sets[i]) - common) < 0.1, (prompt.messages, train[i].messages)
    openings = {tuple(words(p)[: 8 if p.language in ("zh", "ja") else 5]) for p in train}
    assert not [p for p in evaluation if tuple(words(p)[: 8 if p.language in ("zh", "ja") else 5]) in openings]
