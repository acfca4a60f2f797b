"""Making PromptSets: rows are checked and counted, duplicates leave, no prompt changes sides, results are kept."""

import json
import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdist.dataset import prepare
from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.dataset.prompts import PromptSet, prompt_id
from specdist.errors import ArtifactError, ConfigError
from specdist.prompt_policy import PromptPolicy

SHIPPED = Path(__file__).parents[1] / "data" / "prompts"
NOTHING_SHARED = [{"prompt": f"held out number {i}"} for i in range(3)]


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("\n".join([*lines, ""]).encode())
    return str(path)


def questions(count: int, word: str = "question", **fields: str) -> list[dict[str, str]]:
    return [{"prompt": f"{word} number {i}", **fields} for i in range(count)]


def prompt_sets(
    tmp_path: Path, train: PromptMix | str, evaluation: PromptMix | None = None, **options: object
) -> tuple[PromptSet, PromptSet]:
    train = PromptMix([train]) if isinstance(train, str) else train
    held_out = evaluation or PromptMix([write(tmp_path / "held-out.jsonl", *NOTHING_SHARED)])
    return prepare_prompts(train, held_out, directory=tmp_path / "prompts", **options)


def texts(prompts: PromptSet) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in prompts]


def left_out(prompts: PromptSet) -> dict[str, int]:
    """The manifest's counts, which must add up to the rows read."""
    manifest = prompts.manifest
    assert manifest.num_prompts + sum(manifest.left_out.values()) == manifest.num_rows
    assert manifest.num_prompts == len(list(prompts)) == sum(source.num_prompts for source in manifest.sources)
    return manifest.left_out


def test_nothing_of_the_shipped_prompts_is_lost_or_changed(tmp_path: Path) -> None:
    sets = prompt_sets(tmp_path, str(SHIPPED / "train"), PromptMix([str(SHIPPED / "eval")]))
    for side, found in zip(("train", "eval"), sets, strict=True):
        shipped = PromptSet.open(SHIPPED / side)
        assert list(found) == list(shipped)
        assert found.sha256 == shipped.sha256
        assert (found.manifest.domains, found.manifest.languages) == (
            shipped.manifest.domains,
            shipped.manifest.languages,
        )
        assert (left_out(found), found.manifest.policy_actions) == ({}, {})


def test_limit_covers_every_domain_and_larger_limits_contain_smaller(tmp_path: Path) -> None:
    def limited(limit: int) -> PromptSet:
        return prompt_sets(tmp_path, PromptMix([str(SHIPPED / "train")], limit=limit))[0]

    everything, few, more = list(PromptSet.open(SHIPPED / "train")), limited(60), limited(100)
    assert few.manifest.domains == dict.fromkeys({p.domain for p in everything}, 5)
    assert left_out(few) == {"not_chosen": len(everything) - 60}
    assert {p.id for p in few} < {p.id for p in more}
    by_turn = sorted(
        (turn, domain, row)
        for domain in few.manifest.domains
        for turn, row in enumerate(sorted(p.id for p in everything if p.domain == domain))
    )
    assert [p.id for p in more] == [p.id for p in everything if p.id in {row for _, _, row in by_turn[:100]}]
    assert list(limited(10**6)) == everything


def test_d1_few_bad_rows_are_dropped_listed_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [{"id": "c7", "messages": [{"role": "assistant", "content": "hi"}]}, "{", {"prompt": "\ud800"}]
    bad[2] = '{"id": "c9", "prompt": "\\ud800"}'
    file = write(tmp_path / "p.jsonl", *questions(20), *bad, *questions(1000, "another"))
    train, _ = prompt_sets(tmp_path, file, near_duplicate_threshold=0)
    assert left_out(train) == {"bad": 3}
    assert train.manifest.bad == {"role_order": 1, "json": 1, "surrogate": 1}
    assert f"{file}: 3 of 1023 rows cannot be used and are dropped" in caplog.text
    assert "line 21, id 'c7': messages: no user turn" in caplog.text
    assert "line 23, id 'c9': prompt: lone surrogate U+D800" in caplog.text


def test_d1_many_bad_rows_are_one_error_that_shows_ten(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *(["{"] * 13), *questions(100))
    with pytest.raises(ArtifactError, match=r"13 of 113 rows cannot be used, max_bad_share lets 1\.00% pass") as caught:
        prompt_sets(tmp_path, file)
    assert str(caught.value).count("\n  line ") == 10
    assert "and 3 more" in str(caught.value)
    assert not list((tmp_path / "prompts").rglob("*.jsonl")), "nothing half made is left"
    train, _ = prompt_sets(tmp_path, file, policy=PromptPolicy(max_bad_share=0.2))
    assert left_out(train) == {"bad": 13}


def test_d1_policies_are_counted_by_what_they_did(tmp_path: Path) -> None:
    turns = [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "q1"}, {"from": "gpt", "value": "a"}]
    rows = [{"conversations": turns}, {"conversations": [*turns, {"from": "human", "value": "q2"}]}]
    train, _ = prompt_sets(tmp_path, write(tmp_path / "p.jsonl", *rows))
    assert train.manifest.policy_actions == {
        "leading_assistant_dropped": 2,
        "trailing_assistant_dropped": 1,
        "given_answers_dropped": 1,
    }
    assert [len(p.messages) for p in train] == [1, 2]
    kept, _ = prompt_sets(tmp_path, str(tmp_path / "p.jsonl"), policy=PromptPolicy(given_answers="keep"))
    assert [[m["content"] for m in p.messages] for p in kept] == [["q1"], ["q1", "a", "q2"]]


def test_d3_contents_are_the_same_to_the_byte_after_any_number_of_passes(tmp_path: Path) -> None:
    contents = [
        "a\u2028b\u0085c\u2029d\x0b \ufeffé e\u0301",
        " tabs\tand\r\nline ends\n",
        "\U0001f600 👩‍👩‍👧",
        "\x00\x7f",
    ]
    first, _ = prompt_sets(tmp_path, write(tmp_path / "p.jsonl", *({"prompt": c} for c in contents)))
    assert texts(first) == contents
    second, _ = prompt_sets(tmp_path, str(first.path))
    assert second.file.read_bytes() == first.file.read_bytes()
    third, _ = prompt_sets(tmp_path, str(first.file))
    assert third.file.read_bytes() == first.file.read_bytes()


def test_d4_surrogates_are_replaced_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", '{"prompt": "bad \\udcb2 char"}', *questions(3))
    train, _ = prompt_sets(tmp_path, file, policy=PromptPolicy(lone_surrogates="replace"))
    assert texts(train)[0] == "bad \ufffd char"
    assert train.manifest.policy_actions == {"surrogate_replaced": 1}


def test_exact_and_near_duplicates_leave(tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(60))
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": " one\n"}]}, {"prompt": long}]
    file = write(tmp_path / "p.jsonl", *rows, {"prompt": f"{long} more"}, {"prompt": "two"})
    train, _ = prompt_sets(tmp_path, file)
    assert left_out(train) == {"exact_duplicate": 1, "near_duplicate": 1}
    stays = min(long, f"{long} more", key=lambda text: prompt_id([{"role": "user", "content": text}]))
    assert texts(train) == ["one", stays, "two"]
    kept, _ = prompt_sets(tmp_path, file, near_duplicate_threshold=0)
    assert left_out(kept) == {"exact_duplicate": 1}


def test_training_goes_without_what_is_near_an_evaluation_prompt(tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(60))
    held_out = PromptMix([write(tmp_path / "e.jsonl", {"prompt": long}, {"prompt": f"{long} too"})])
    file = write(tmp_path / "t.jsonl", {"prompt": f"{long} more"}, {"prompt": "another"})
    train, evaluation = prompt_sets(tmp_path, file, held_out)
    assert (texts(train), left_out(train)) == (["another"], {"near_evaluation": 1})
    assert (len(evaluation), left_out(evaluation)) == (2, {}), "a benchmark is measured with as a whole"


def test_a_prompt_of_both_sides_is_an_error_or_left_out_of_training(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *questions(5))
    held_out = PromptMix([write(tmp_path / "e.jsonl", *questions(2), *NOTHING_SHARED)])
    with pytest.raises(
        ArtifactError, match=r"2 prompts are in both .*t\.jsonl and .*e\.jsonl, for example [0-9a-f]{16};"
    ):
        prompt_sets(tmp_path, file, held_out)
    train, evaluation = prompt_sets(tmp_path, file, held_out, policy=PromptPolicy(shared_prompts="drop"))
    assert (len(train), left_out(train)) == (3, {"in_evaluation": 2})
    assert len(evaluation) == 5


def test_one_id_for_different_messages_becomes_the_hash(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{n}.jsonl", {"id": "a", "prompt": f"one {n}"}, {"id": 1, "prompt": f"two {n}"}) for n in "xy"
    ]
    train, _ = prompt_sets(tmp_path, PromptMix(files))
    assert [p.id for p in train] == ["a", "1", *(prompt_id(p.messages) for p in list(train)[2:])]
    assert train.manifest.policy_actions == {"id_replaced": 2}


def test_domains_are_kept_or_assigned(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.jsonl", *questions(2, n), *questions(1, n + n, domain="math")) for n in "xy"]
    train, _ = prompt_sets(tmp_path, PromptMix(files, domains=["coding", ""]))
    assert train.manifest.domains == {"coding": 2, "math": 2, "general": 2}


def test_sources_of_all_kinds_are_mixed_by_weight(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(questions(90, "parquet")), tmp_path / "p.parquet")
    sources = [write(tmp_path / "p.jsonl", *questions(50, "jsonl")), str(tmp_path / "p.parquet")]
    train, _ = prompt_sets(tmp_path, PromptMix(sources, weights=[1, 3]))
    assert [(s.num_rows, s.num_prompts) for s in train.manifest.sources] == [(50, 30), (90, 90)]
    assert left_out(train) == {"not_chosen": 20}
    few, _ = prompt_sets(tmp_path, PromptMix(sources, weights=[1, 3], limit=20))
    assert [s.num_prompts for s in few.manifest.sources] == [5, 15]
    assert set(texts(few)) < set(texts(train))


def test_no_prompt_changes_sides_when_data_is_added_or_moved(tmp_path: Path) -> None:
    rows = questions(400)
    split = {"evaluation": PromptMix([]), "eval_fraction": 0.2}
    few = prompt_sets(tmp_path, write(tmp_path / "few.jsonl", *rows[:150]), **split)
    random.Random(0).shuffle(rows)
    more = prompt_sets(
        tmp_path,
        PromptMix([write(tmp_path / "a.jsonl", *rows[:300]), write(tmp_path / "b.jsonl", *rows[300:])]),
        **split,
    )
    for before, after in zip(few, more, strict=True):
        assert 0 < len(before) < len(after)
        assert set(texts(before)) < set(texts(after))
    train, evaluation = more
    assert not set(texts(train)) & set(texts(evaluation))
    assert len(train) + len(evaluation) == 400
    assert left_out(evaluation) == {"other_side": len(train)}
    assert left_out(train) == {"other_side": len(evaluation)}
    assert 0.12 < len(evaluation) / 400 < 0.28


def test_what_is_held_out_has_its_own_limit_and_the_training_mixture(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{n}.jsonl", *questions(200, n)) for n in "xy"]
    train, evaluation = prompt_sets(
        tmp_path, PromptMix(sources, [1, 1], limit=100), PromptMix([], limit=20), eval_fraction=0.2
    )
    assert [s.num_prompts for s in train.manifest.sources] == [50, 50]
    assert [s.num_prompts for s in evaluation.manifest.sources] == [10, 10]
    left_out(train), left_out(evaluation)


def test_the_same_inputs_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "p.jsonl", *questions(20))
    first, _ = prompt_sets(tmp_path, file)
    monkeypatch.setattr(prepare, "_make", lambda *_: pytest.fail("made again"))
    again, _ = prompt_sets(tmp_path, file)
    assert again == first
    moved = write(tmp_path / "moved.jsonl", *questions(20))
    assert prompt_sets(tmp_path, moved)[0].path == first.path, "content decides, not the name"
    monkeypatch.undo()
    others = [
        prompt_sets(tmp_path, write(tmp_path / "p.jsonl", *questions(21)))[0],
        prompt_sets(tmp_path, moved, policy=PromptPolicy(lone_surrogates="replace"))[0],
        prompt_sets(tmp_path, moved, near_duplicate_threshold=0.9)[0],
        prompt_sets(tmp_path, PromptMix([moved], domains=["math"]))[0],
        prompt_sets(tmp_path, PromptMix([moved], limit=3))[0],
    ]
    assert len({p.path for p in (first, *others)}) == 6


def test_an_altered_result_is_named_and_a_killed_one_is_made_again(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *questions(20))
    first, _ = prompt_sets(tmp_path, file)
    leftover = first.path.parent.with_name(f".tmp-12345678-{first.path.parent.name}")
    (first.path / "manifest.json").unlink()
    leftover.mkdir()
    again, _ = prompt_sets(tmp_path, file)
    assert again.manifest == first.manifest
    assert not leftover.exists()
    again.file.write_bytes(b"")
    with pytest.raises(ArtifactError, match="its manifest says"):
        prompt_sets(tmp_path, file)


def test_empty_sides_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"p\.jsonl: none of 0 rows is a usable prompt"):
        prompt_sets(tmp_path, write(tmp_path / "p.jsonl"))
    few = write(tmp_path / "few.jsonl", {"prompt": "a"})
    with pytest.raises(ArtifactError, match=r"left to evaluate with: 1 rows read, left out \{'other_side': 1\}"):
        prompt_sets(tmp_path, few, PromptMix([]), eval_fraction=0.01)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"sources": ["a", "b"], "weights": [1.0]}, "1 weights for 2 sources"),
        ({"sources": ["a"], "weights": [0.0]}, "numbers above 0"),
        ({"sources": ["a"], "domains": ["x", "y"]}, "2 domains for 1 sources"),
        ({"sources": ["a"], "limit": 0}, "limit 0: expected 1 or more"),
    ],
)
def test_mix_out_of_range(mix: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptMix(**mix)


def test_options_out_of_range(tmp_path: Path) -> None:
    for options, message in (
        ({"near_duplicate_threshold": 0.1}, "near_duplicate_threshold = 0.1"),
        ({"evaluation": PromptMix([]), "eval_fraction": 0.0}, "eval_fraction = 0.0"),
        ({"train": PromptMix([])}, "no training sources"),
    ):
        with pytest.raises(ConfigError, match=message):
            prompt_sets(tmp_path, **{"train": "unused", **options})


def test_memory_grows_by_little_for_each_row(tmp_path: Path) -> None:
    """What is held of a row is numbers, whatever its length: here less than half of its text."""

    def peak(num_rows: int) -> tuple[int, int]:
        rng = random.Random(0)
        rows = ({"prompt": " ".join(f"{rng.randrange(10**8):x}" for _ in range(150))} for _ in range(num_rows))
        file = write(tmp_path / "p.jsonl", *rows)
        tracemalloc.start()
        prompt_sets(tmp_path, file)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found, Path(file).stat().st_size

    peak(100)  # imports
    (few, small), (more, large) = peak(1000), peak(3000)
    assert (large - small) / 2000 > 1000
    assert (more - few) / 2000 < 500
