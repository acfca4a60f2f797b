"""Owns one row: what it may look like, what a declared policy repairs in it, and in words why it cannot be used.

A row is a JSON object with one of `messages` (role and content), `prompt` (one user turn), `conversations` (ShareGPT's
from and value) or `turns` (Spec-Bench's user turns), and if wanted `id`, `domain` and `language`. A key that is null
counts as absent; keys that are not named here are ignored.
"""

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

from specdist.dataset.prompts import prompt_id
from specdist.prompt_policy import PromptPolicy
from specdist.schema import Prompt

ROLES = ("system", "user", "assistant")
CONVERSATION_FIELDS = ("messages", "conversations", "turns", "prompt")
FIELDS = (*CONVERSATION_FIELDS, "id", "question_id", "domain", "category", "language", "tools")
_SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
}
_TOOL_ROLES = ("tool", "function", "function_call", "tool_call", "observation")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadRow(ValueError):
    """Why one row cannot be used. `kind` is what such rows are counted by."""

    def __init__(self, kind: str, reason: str, row_id: str = "?") -> None:
        super().__init__(reason)
        self.kind = kind
        self.row_id = row_id


class ParsedRow(NamedTuple):
    """A prompt, the hash of its messages (its id where the row named none), and what policies did to the row."""

    prompt: Prompt
    digest: str
    actions: list[str]


class _Turn(NamedTuple):
    where: str
    role: str
    content: Any


def parse_row(raw: bytes | dict[str, Any], policy: PromptPolicy, domain: str = "general") -> ParsedRow:
    """One prompt from a line of JSON or a decoded row; `domain` is for rows without one. Raises BadRow."""
    row = _decode(raw) if isinstance(raw, bytes) else raw
    row_id = row.get("question_id") if row.get("id") is None else row["id"]
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        row_id = str(row_id)
    if isinstance(category := row.get("category"), str) and category:
        domain = category
    actions: list[str] = []
    try:
        messages = _messages(row, policy, actions)
        digest = prompt_id(messages)
        prompt = Prompt(
            id=_field("id", row_id, digest, policy, actions),
            domain=_field("domain", row.get("domain"), domain, policy, actions),
            language=_field("language", row.get("language"), "und", policy, actions),
            messages=messages,
        )
        return ParsedRow(prompt, digest, actions)
    except BadRow as error:
        error.row_id = ascii(row_id) if row_id is not None else "?"
        raise


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow("encoding", f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRow("json", f"not JSON ({error.msg} at character {error.pos})") from None
    except ValueError as error:
        raise BadRow("json", f"not JSON that can be read ({error})") from None
    except RecursionError:
        raise BadRow("json", "not JSON that can be read (nested too deeply)") from None
    if not isinstance(row, dict):
        raise BadRow("json", f"expected a JSON object, got {type(row).__name__}")
    return row


def _field(name: str, value: Any, default: str, policy: PromptPolicy, actions: list[str]) -> str:
    if value is None:
        value = default
    if not isinstance(value, str) or not value:
        raise BadRow("field", f"{name}: expected a string that is not empty, got {value!r}")
    return _text(value, name, policy, actions)


def _messages(row: dict[str, Any], policy: PromptPolicy, actions: list[str]) -> list[dict[str, str]]:
    if row.get("tools"):
        raise BadRow("tools", "offers tools; only answers in text are trained on")
    name = _conversation_field(row)
    turns = _turns(name, row[name])
    for turn in turns[1:]:
        if turn.role == "system":
            raise BadRow("role_order", f"{turn.where} is system; expected it first or not at all")
    if policy.role_order == "repair":
        turns = _repaired(name, turns, actions)
    elif name != "turns":
        _check_order(turns)
    if not any(turn.role == "user" for turn in turns):
        raise BadRow("role_order", f"{name}: no user turn; there is nothing to answer")
    turns = _without_given_answers(turns, policy, actions)
    return [{"role": turn.role, "content": _content(turn, policy, actions)} for turn in turns]


def _conversation_field(row: dict[str, Any]) -> str:
    present = [name for name in CONVERSATION_FIELDS if row.get(name) is not None]
    if present == ["messages", "prompt"] and _first_user_content(row["messages"]) == row["prompt"]:
        return "messages"  # as UltraChat has it
    if len(present) != 1:
        found = f"got {' and '.join(present)}" if present else f"got {', '.join(sorted(map(str, row))[:8]) or 'no key'}"
        raise BadRow("fields", f"expected exactly one of {', '.join(CONVERSATION_FIELDS)}; {found}")
    return present[0]


def _first_user_content(messages: Any) -> Any:
    turns = messages if isinstance(messages, list) else []
    return next((t.get("content") for t in turns if isinstance(t, dict) and t.get("role") == "user"), None)


def _turns(name: str, value: Any) -> list[_Turn]:
    if name == "prompt":
        return [_Turn("prompt", "user", value)]
    if not isinstance(value, list) or not value:
        raise BadRow("turn", f"{name}: expected a list that is not empty")
    if name == "turns":
        return [_Turn(f"turns[{i}]", "user", content) for i, content in enumerate(value)]
    return [_turn(name, i, turn) for i, turn in enumerate(value)]


def _turn(name: str, index: int, turn: Any) -> _Turn:
    where = f"{name}[{index}]"
    given = turn if isinstance(turn, dict) else {}
    sharegpt = name == "conversations" and "role" not in given
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    if given.get(role_key) in _TOOL_ROLES or given.get("tool_calls"):
        raise BadRow("tools", f"{where}: calls or answers a tool; only answers in text are trained on")
    if role_key not in given or content_key not in given:
        raise BadRow("turn", f"{where}: expected an object with {role_key} and {content_key}")
    role, content = given[role_key], given[content_key]
    known = _SHAREGPT_ROLES if name == "conversations" else ROLES
    if not isinstance(role, str) or role not in known:
        raise BadRow("role", f"{where}: unknown role {role!r}; expected one of {', '.join(known)}")
    return _Turn(where, _SHAREGPT_ROLES[role], content)


def _repaired(name: str, turns: list[_Turn], actions: list[str]) -> list[_Turn]:
    """The turns in an order that can be answered; `actions` gets a name for each kind of repair."""
    system = turns[:1] if turns[0].role == "system" else []
    rest = turns[len(system) :]
    if system and isinstance(system[0].content, str) and not system[0].content.strip():
        system = []
        actions.append("empty_system_dropped")
    users = [i for i, turn in enumerate(rest) if turn.role == "user"]
    if not users:
        return [*system, *rest]
    if users[0] > 0:
        actions.append("leading_assistant_dropped")
    if users[-1] < len(rest) - 1:
        actions.append("trailing_assistant_dropped")
    if name != "turns" and any(b - a == 1 for a, b in pairwise(users)):
        actions.append("consecutive_users_answered_apart")
    return [*system, *rest[users[0] : users[-1] + 1]]


def _check_order(turns: list[_Turn]) -> None:
    start = 1 if turns[0].role == "system" else 0
    for i, turn in enumerate(turns[start:], start=start):
        expected = "user" if (i - start) % 2 == 0 else "assistant"
        if turn.role != expected:
            before = f"{turns[i - 1].where} is {turns[i - 1].role}, " if i else ""
            reason = f"{before}{turn.where} is {turn.role}, expected {expected}: turns must alternate, user first"
            raise BadRow("role_order", reason)
    if (last := turns[-1]).role != "user":
        raise BadRow("role_order", f"{last.where}, the last, is {last.role}, expected user: the target answers it")


def _without_given_answers(turns: list[_Turn], policy: PromptPolicy, actions: list[str]) -> list[_Turn]:
    if not any(turn.role == "assistant" for turn in turns):
        return turns
    if policy.given_answers == "regenerate":
        actions.append("given_answers_dropped")
        return [turn for turn in turns if turn.role != "assistant"]
    kept = [turn for i, turn in enumerate(turns) if turn.role != "assistant" or turns[i - 1].role != "assistant"]
    if len(kept) < len(turns):
        actions.append("second_assistant_dropped")
    return kept


def _content(turn: _Turn, policy: PromptPolicy, actions: list[str]) -> str:
    if not isinstance(turn.content, str):
        raise BadRow("content", f"{turn.where}: content is {type(turn.content).__name__}, expected text")
    if not turn.content.strip():
        raise BadRow("content", f"{turn.where}: content is empty")
    return _text(turn.content, turn.where, policy, actions)


def _text(text: str, where: str, policy: PromptPolicy, actions: list[str]) -> str:
    """A lone surrogate (a JSON escape can spell one) has no UTF-8 form: no tokenizer and no file could take it."""
    if text.isascii() or not (found := _SURROGATE.search(text)):
        return text
    if policy.lone_surrogates == "reject":
        raise BadRow("surrogate", f"{where}: lone surrogate U+{ord(found[0]):04X} at character {found.start()}")
    if "surrogate_replaced" not in actions:
        actions.append("surrogate_replaced")
    return _SURROGATE.sub("\ufffd", text)
