"""The PromptSet: ids and hashes of prompts, reading a set row by row; the shipped prompts are split soundly."""

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from specdist.dataset.prompts import PromptManifest, PromptSet, lines_sha256, prompt_id, prompt_line, prompts_sha256
from specdist.errors import ArtifactError
from specdist.provenance import sha256_bytes, sha256_file, write_json
from specdist.schema import Prompt

SHIPPED = Path(__file__).parents[1] / "data" / "prompts"


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def prompt(content: str, **fields: str) -> Prompt:
    messages = user(content)
    return Prompt(**{"id": prompt_id(messages), "domain": "general", "language": "en", "messages": messages, **fields})


def write_set(directory: Path, *lines: bytes) -> Path:
    file = directory / "prompts.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    manifest = PromptManifest(len(lines), sha256_file(file), domains={}, languages={})
    write_json(directory / "manifest.json", manifest.to_json())
    return directory


def test_prompt_id_ignores_unicode_form_and_outer_space_only() -> None:
    assert prompt_id(user("e\u0301 ")) == prompt_id(user("\u00e9"))
    assert prompt_id(user("a  b")) != prompt_id(user("a b"))
    assert re.fullmatch("[0-9a-f]{16}", prompt_id(user("a")))


def test_prompts_sha256_depends_on_what_is_said_and_not_on_order() -> None:
    one, two = prompt("one"), prompt("two")
    assert prompts_sha256([one, two]) == prompts_sha256(iter([two, one])) != prompts_sha256([one])
    assert prompts_sha256([one]) != prompts_sha256([prompt("one", domain="math")])


def test_lines_sha256_keeps_digests_that_end_in_zeros() -> None:
    digests = [b"\x02" * 31 + b"\x00", b"\x01" * 32, b"\x02" * 32]
    assert lines_sha256(b"".join(digests)) == sha256_bytes(b"".join(sorted(digests)))


def test_a_set_gives_back_what_was_written(tmp_path: Path) -> None:
    written = [prompt("a\u2028b\u0085c"), prompt("two", id="7"), Prompt("x", "chat", "de", [*user("q"), *user("r")])]
    found = PromptSet.open(write_set(tmp_path, *map(prompt_line, written)))
    assert list(found) == list(found) == written
    assert len(found) == 3
    assert found.sha256 == prompts_sha256(written)


def test_a_manifest_that_names_the_hash_saves_computing_it(tmp_path: Path) -> None:
    write_set(tmp_path, prompt_line(prompt("one")))
    known = PromptManifest(1, sha256_file(tmp_path / "prompts.jsonl"), {}, {}, content_sha256="known")
    write_json(tmp_path / "manifest.json", known.to_json())
    assert PromptSet.open(tmp_path).sha256 == "known"


def test_a_row_without_the_fields_of_a_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="line 1 has no 'id'; pass it as a source"):
        list(PromptSet.open(write_set(tmp_path, b'{"prompt": "one"}')))


def test_a_missing_or_altered_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json: no such file"):
        PromptSet.open(tmp_path)
    write_set(tmp_path, prompt_line(prompt("one")))
    (tmp_path / "prompts.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ArtifactError, match="its manifest says"):
        PromptSet.open(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"prompts\.jsonl: no such file"):
        PromptSet.open(tmp_path)


@pytest.mark.parametrize("side", ["train", "eval"])
def test_shipped_manifest_and_split(side: str) -> None:
    prompts = PromptSet.open(SHIPPED / side)
    manifest = prompts.manifest
    assert len(prompts) >= {"train": 640, "eval": 210}[side]
    assert len(prompts) == len(list(prompts))
    assert manifest.licence == "Apache-2.0"
    assert manifest.domains == Counter(p.domain for p in prompts)
    assert manifest.languages == Counter(p.language for p in prompts)
    assert len(manifest.domains) == 12
    for found in prompts:
        assert found.id == prompt_id(found.messages)
        assert ("eval" if int(found.id[:8], 16) % 100 < 25 else "train") == side


def words(prompt: Prompt) -> list[str]:
    """Words, or characters where the script writes no spaces."""
    found = re.findall(r"\w+", prompt.messages[0]["content"].casefold())
    return list("".join(found)) if prompt.language in ("zh", "ja") else found


def shingles(prompt: Prompt) -> set[str]:
    """Runs of 5 words (8 characters in Chinese and Japanese)."""
    size, units = (8 if prompt.language in ("zh", "ja") else 5), words(prompt)
    return {" ".join(units[i : i + size]) for i in range(max(1, len(units) - size + 1))}


def test_no_near_duplicate_crosses_the_split() -> None:
    """Jaccard of shingles below 0.1: two prompts of 30 words that share a run of ten have 6/46 = 0.13.

    The closest pair has 0.023. Nor do two prompts begin alike: one template filled twice would leak its answer's form.
    """
    train, evaluation = (list(PromptSet.open(SHIPPED / side)) for side in ("train", "eval"))
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
