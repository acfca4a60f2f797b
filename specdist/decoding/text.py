"""Owns turning an answer's tokens into text while they come, so that no half of a character is ever shown."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to


class IncrementalText:
    """The text of one answer, token by token; put together it is `tokenizer.decode` of the whole.

    A token whose bytes do not complete a character adds nothing: they come with the token that completes it. Special
    tokens add nothing either. The tokens of the piece before are decoded along with the new ones, since tokenizers
    treat the first token of a text in their own way (a leading space, for one).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._before: list[int] = []  # tokens of the piece that was given last
        self._held: list[int] = []  # tokens since then

    def add(self, token_ids: Iterable[int]) -> list[str]:
        """What each of the next tokens adds to the text: as many pieces as tokens, empty ones where it adds nothing."""
        return [self._add(token) for token in token_ids]

    def rest(self) -> str:
        """What is left at the end: the signs that stand for bytes of a character that was never completed."""
        return self._given(self._new())

    def _add(self, token_id: int) -> str:
        self._held.append(token_id)
        new = self._new()
        return "" if new.endswith(_INCOMPLETE) else self._given(new)

    def _new(self) -> str:
        before = self._decode(self._before)
        return self._decode([*self._before, *self._held])[len(before) :]

    def _given(self, new: str) -> str:
        if new:
            self._before, self._held = self._held, []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
