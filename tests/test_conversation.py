"""One row: all forms become prompts, declared policies repair and name what they did, the rest is refused in words."""

import json
import re

import pytest

from specdist.dataset.conversation import BadRow, ParsedRow, parse_row
from specdist.dataset.prompts import prompt_id
from specdist.errors import ConfigError
from specdist.prompt_policy import PromptPolicy
from specdist.schema import Prompt

REJECT = PromptPolicy(role_order="reject")
KEEP = PromptPolicy(given_answers="keep")


def turns(*roles: str) -> list[dict[str, str]]:
    """Turns whose content is their role's first letter and their place."""
    return [{"role": role, "content": f"{role[0]}{i}"} for i, role in enumerate(roles)]


def parse(row: object, policy: PromptPolicy | None = None, domain: str = "general") -> ParsedRow:
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    return parse_row(raw, policy or PromptPolicy(), domain)


def contents(row: ParsedRow) -> str:
    return " ".join(m["content"] for m in row.prompt.messages)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]},
        {"conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
        {"messages": [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "q"}], "tools": []},
    ],
)
def test_every_form_of_a_conversation_is_the_same_prompt(row: dict[str, object]) -> None:
    parsed = parse(row)
    assert parsed.prompt.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert parsed.prompt.id == parsed.digest == prompt_id(parsed.prompt.messages)
    assert parsed.actions == []


def test_prompt_and_turns_are_user_turns() -> None:
    assert parse({"prompt": "q", "messages": None}).prompt.messages == [{"role": "user", "content": "q"}]
    spec_bench = parse({"question_id": 81, "category": "writing", "turns": ["one", "two"]}, REJECT)
    assert spec_bench.prompt == Prompt("81", "writing", "und", [{"role": "user", "content": c} for c in ("one", "two")])
    assert spec_bench.actions == []


def test_prompt_beside_messages_must_be_their_first_user_turn() -> None:
    messages = turns("user", "assistant", "user")
    assert contents(parse({"prompt": "u0", "prompt_id": "x", "messages": messages}, KEEP)) == "u0 a1 u2"
    with pytest.raises(BadRow, match=r"exactly one of .* got messages and prompt"):
        parse({"prompt": "another", "messages": messages})


def test_labels_are_kept_or_assigned() -> None:
    def domain(**row: object) -> str:
        return parse({"prompt": "a", **row}, domain="of the source").prompt.domain

    assert domain(domain="math", category="writing") == "math"
    assert domain(domain=None, category="writing") == "writing"
    assert domain(category=3) == domain() == "of the source"
    assert parse({"prompt": "a", "language": "de"}).prompt.language == "de"
    assert parse({"prompt": "a", "language": None}).prompt.language == "und"


@pytest.mark.parametrize(
    ("roles", "kept", "actions"),
    [
        (["assistant", "user", "assistant"], "u1", ["leading_assistant_dropped", "trailing_assistant_dropped"]),
        (["user", "user", "assistant"], "u0 u1", ["trailing_assistant_dropped", "consecutive_users_answered_apart"]),
        (["system", "assistant", "assistant", "user"], "s0 u3", ["leading_assistant_dropped"]),
        (["user", "assistant", "user"], "u0 u2", ["given_answers_dropped"]),
        (["user", "user"], "u0 u1", ["consecutive_users_answered_apart"]),
    ],
)
def test_d1_role_order_is_repaired_and_named(roles: list[str], kept: str, actions: list[str]) -> None:
    parsed = parse({"messages": turns(*roles)})
    assert contents(parsed) == kept
    assert parsed.actions == actions


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
def test_d1_role_order_is_rejected_with_the_offending_indices(roles: list[str], words: list[str]) -> None:
    with pytest.raises(BadRow) as caught:
        parse({"id": "c7", "messages": turns(*roles)}, REJECT)
    assert (caught.value.kind, caught.value.row_id) == ("role_order", "'c7'")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("roles", "kept", "actions"),
    [
        (["user", "assistant", "user"], "u0 a1 u2", []),
        (["user", "assistant", "assistant", "user"], "u0 a1 u3", ["second_assistant_dropped"]),
        (["user", "assistant"], "u0", ["trailing_assistant_dropped"]),
    ],
)
def test_given_answers_are_kept_as_history(roles: list[str], kept: str, actions: list[str]) -> None:
    parsed = parse({"messages": turns(*roles)}, KEEP)
    assert (contents(parsed), parsed.actions) == (kept, actions)


def test_d2_system_turn_is_kept_where_it_is_first_and_refused_elsewhere() -> None:
    assert contents(parse({"messages": turns("system", "user", "assistant", "user")}, KEEP)) == "s0 u1 a2 u3"
    for roles in (("user", "system"), ("user", "system", "user"), ("system", "system", "user")):
        with pytest.raises(BadRow, match=r"messages\[1\] is system; expected it first") as caught:
            parse({"messages": turns(*roles)})
        assert caught.value.kind == "role_order"


def test_d2_an_empty_system_turn_is_dropped_and_named() -> None:
    row = {"messages": [{"role": "system", "content": " "}, *turns("user")]}
    parsed = parse(row)
    assert (contents(parsed), parsed.actions) == ("u0", ["empty_system_dropped"])
    with pytest.raises(BadRow, match=r"messages\[0\]: content is empty"):
        parse(row, REJECT)


@pytest.mark.parametrize("field", ['"messages":[{"role":"user","content":"bad \\udcb2 char"}]', '"prompt":"\\ud800"'])
def test_d4_lone_surrogate_is_a_row_error_or_replaced(field: str) -> None:
    line = ('{"id":"x1",' + field + "}").encode()
    with pytest.raises(BadRow, match=r"lone surrogate U\+D") as caught:
        parse(line)
    assert (caught.value.kind, caught.value.row_id) == ("surrogate", "'x1'")
    parsed = parse(line, PromptPolicy(lone_surrogates="replace"))
    assert contents(parsed) in ("bad \ufffd char", "\ufffd")
    assert parsed.actions == ["surrogate_replaced"]
    parsed.prompt.messages[0]["content"].encode()


def test_d4_surrogates_in_other_fields_and_pairs() -> None:
    for field in ("id", "domain", "language"):
        with pytest.raises(BadRow, match=f"{field}: lone surrogate"):
            parse(b'{"prompt": "a", "%s": "\\ud800"}' % field.encode())
    assert contents(parse(b'{"prompt":"\\ud83d\\ude00"}')) == "\U0001f600"
    dropped = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"\\ud800"}]}'
    assert contents(parse(dropped)) == "a"


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (b'{"prompt": "cut', "json", "not JSON"),
        (b'{"prompt":"\xff"}', "encoding", "not UTF-8"),
        (b"[" * 100_000, "json", "nested too deeply"),
        (b'{"id": ' + b"1" * 5000 + b"}", "json", "not JSON that can be read"),
        ([1], "json", "expected a JSON object, got list"),
        ({}, "fields", "expected exactly one of messages, conversations, turns, prompt; got no key"),
        ({"text": "a", "label": 1}, "fields", "got label, text"),
        ({"prompt": "a", "turns": ["a"]}, "fields", "got turns and prompt"),
        ({"messages": []}, "turn", "a list that is not empty"),
        ({"messages": "hello"}, "turn", "a list that is not empty"),
        ({"messages": ["hello"]}, "turn", "messages[0]: expected an object with role and content"),
        ({"messages": [{"role": "user"}]}, "turn", "an object with role and content"),
        ({"conversations": [{"from": "human"}]}, "turn", "an object with from and value"),
        ({"messages": [{"role": "human", "content": "a"}]}, "role", "unknown role 'human'"),
        ({"conversations": [{"from": ["x"], "value": "a"}]}, "role", "unknown role ['x']"),
        ({"messages": turns("assistant")}, "role_order", "no user turn"),
        ({"prompt": "  \n "}, "content", "content is empty"),
        ({"prompt": ["part"]}, "content", "content is list, expected text"),
        ({"turns": ["a", None]}, "content", "turns[1]: content is NoneType"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools", "offers tools"),
        ({"messages": [*turns("user"), {"role": "tool", "content": "4"}]}, "tools", "messages[1]: calls or answers"),
        ({"messages": [*turns("user"), {"role": "assistant", "tool_calls": [{}]}]}, "tools", "messages[1]"),
        ({"prompt": "a", "domain": 3}, "field", "domain: expected a string"),
        ({"prompt": "a", "id": ""}, "field", "id: expected a string"),
        ({"prompt": "a", "id": True}, "field", "id: expected a string"),
    ],
)
def test_what_cannot_be_used_is_named(row: object, kind: str, reason: str) -> None:
    with pytest.raises(BadRow, match=re.escape(reason)) as caught:
        parse(row)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"role_order": "merge"}, "role_order = 'merge': expected repair or reject"),
        ({"given_answers": "drop"}, "given_answers = 'drop'"),
        ({"max_bad_share": 1.5}, "max_bad_share = 1.5"),
    ],
)
def test_policy_out_of_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        PromptPolicy(**values)
