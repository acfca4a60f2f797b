"""Owns the rendering of conversations into the token ids that the target reads, as the server renders them.

There is one path: the tokenizer's chat template over the whole conversation, in one pass, without tokens added to it.
Generation, training and evaluation read its ids and never render again.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from specdist.errors import ArtifactError, ConfigError
from specdist.schema import ChatFormat

Messages = list[dict[str, str]]
_PROBE = "a system turn"


class PromptRejected(ArtifactError):
    """One conversation cannot be given to the target. `reason` is a short key to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that control the model: declared special tokens and added tokens marked special."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


class Renderer:
    """Renders conversations for one target under one ChatFormat. `actions` counts what its policies did.

    Raises ConfigError where the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the target's tokenizer has no chat template; choose an instruct model or add one")
        self.tokenizer, self.format = tokenizer, chat_format
        self.actions: Counter[str] = Counter()
        self._special = special_token_ids(tokenizer)
        names = tokenizer.convert_ids_to_tokens(sorted(self._special))
        self._spelling = re.compile("|".join(re.escape(name.strip().casefold()) for name in names if name.strip()))
        self.has_system_role = self._renders_system_turns()
        if found := self._control_tokens([[{"role": "system", "content": chat_format.system_prompt or ""}]]):
            raise ConfigError(f"system_prompt: {found[0]}; write it without them")
        if chat_format.system_prompt and not self.has_system_role and chat_format.system_role == "reject":
            raise ConfigError(
                "system_prompt is set, but the target's chat template has no system role and system_role is reject; "
                "set system_role: fold to put it before the first user turn"
            )

    def _template(self, conversations: Sequence[Messages]) -> list[str]:
        rendered: Any = self.tokenizer.apply_chat_template(
            list(conversations),
            add_generation_prompt=True,
            tokenize=False,
            tools=list(self.format.tools) or None,
            **self.format.template_arguments,
        )
        return list(rendered)

    def _renders_system_turns(self) -> bool:
        """Templates without a system role refuse such a turn, or leave it out."""
        turns = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "a question"}]
        try:
            return _PROBE in self._template([turns])[0]
        except jinja2.TemplateError:
            return False

    def prepared(self, messages: Messages) -> Messages:
        """The conversation with the system prompt, folded where the template has no system role."""
        if messages[0]["role"] != "system":
            if not self.format.system_prompt:
                return messages
            messages = [{"role": "system", "content": self.format.system_prompt}, *messages]
        if self.has_system_role:
            return messages
        if self.format.system_role == "reject":
            raise PromptRejected("system_role", "messages[0] is system, which the target's chat template does not have")
        self.actions["system_turn_folded"] += 1
        system, first, *rest = messages
        return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]

    def encode(self, messages: Messages) -> list[int]:
        """Token ids of the conversation up to where the answer starts. Raises PromptRejected.

        Reasons: "system_role"; "template" where the template refuses the messages; "control_token" where a content
        spells a control token, which tokenised with the rest would end or open a turn.
        """
        result = self.encode_many([messages])[0]
        if isinstance(result, PromptRejected):
            raise result
        return result

    def encode_many(self, conversations: Sequence[Messages]) -> list[list[int] | PromptRejected]:
        """`encode` of each, in a few calls of the tokenizer; what cannot be rendered comes back as its reason."""
        results: list[list[int] | PromptRejected | None] = [None] * len(conversations)
        usable: list[tuple[int, str]] = []
        found = self._control_tokens(conversations)
        for i, messages in enumerate(conversations):
            try:
                if i in found:
                    raise PromptRejected("control_token", found[i])
                usable += [(i, self._render(messages))]
            except PromptRejected as error:
                results[i] = error
        if usable:
            ids = self.tokenizer([text for _, text in usable], add_special_tokens=False)["input_ids"]
            for (i, _), row in zip(usable, ids, strict=True):
                results[i] = row
        return [result for result in results if result is not None]

    def _render(self, messages: Messages) -> str:
        try:
            return self._template([self.prepared(messages)])[0]
        except jinja2.TemplateError as error:
            raise PromptRejected("template", f"the chat template refuses these messages: {error}") from error

    def _control_tokens(self, conversations: Sequence[Messages]) -> dict[int, str]:
        """By index of a conversation, what is said of the first content that spells a control token.

        Only contents in which the name of one occurs, in whatever case or width, are tokenised to find out.
        """
        places = [
            (i, k, message["content"])
            for i, turns in enumerate(conversations)
            for k, message in enumerate(turns)
            if self._spelling.search(_folded(message["content"]))
        ]
        if not places:
            return {}
        contents = self.tokenizer([content for *_, content in places], add_special_tokens=False)["input_ids"]
        found: dict[int, str] = {}
        for (i, k, _), ids in zip(places, contents, strict=True):
            if i not in found and (control := self._special.intersection(ids)):
                tokens = self.tokenizer.convert_ids_to_tokens(sorted(control))
                found[i] = f"messages[{k}]: content spells the control tokens {tokens}"
        return found

    def answer_text(self, completion_ids: list[int]) -> str:
        """An answer as the server returns it and a client sends it back in the next turn: without control tokens."""
        return str(self.tokenizer.decode(completion_ids, skip_special_tokens=True))


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def open_turns(messages: Messages) -> list[int]:
    """Lengths of the conversation's beginnings that await an answer: each user turn that no assistant turn follows."""
    roles = [m["role"] for m in messages] + ["end"]
    return [i + 1 for i in range(len(messages)) if roles[i] == "user" and roles[i + 1] != "assistant"]


def history(messages: Messages, answers: Sequence[str], turn: int) -> Messages:
    """The conversation up to open turn `turn`, with the target's own `answers` to the open turns before it."""
    ends, result, given = open_turns(messages), [], iter(answers)
    for i, message in enumerate(messages[: ends[turn]], start=1):
        result.append(message)
        if i in ends[:turn]:
            result.append({"role": "assistant", "content": next(given)})
    return result
