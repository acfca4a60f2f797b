"""Text while tokens come: no half of a character is shown, and put together the pieces are the whole text."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdist.decoding.text import IncrementalText


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_character_comes_with_the_token_that_completes_it(tiny_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    text = "naïve the 日本語 👩‍🚀\n\tin €"
    token_ids = tiny_tokenizer(text)["input_ids"]
    assert len(token_ids) > len(text) + 10, "characters must span tokens"
    streamed, pieces = IncrementalText(tiny_tokenizer), []
    for start in range(0, len(token_ids), size):
        pieces += streamed.add(token_ids[start : start + size])
        assert text.startswith("".join(pieces))
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text
    assert streamed.rest() == ""
    assert pieces.count("") == len(text.encode()) - len(text), "every byte of a character but its last adds nothing"


def test_what_is_never_completed_comes_at_the_end_or_with_what_follows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    half = tiny_tokenizer("日")["input_ids"][:2]
    letter = tiny_tokenizer("a")["input_ids"]
    streamed = IncrementalText(tiny_tokenizer)
    assert streamed.add(half) == ["", ""]
    assert streamed.rest() == tiny_tokenizer.decode(half)
    streamed = IncrementalText(tiny_tokenizer)
    assert "".join(streamed.add(half + letter)) == tiny_tokenizer.decode(half + letter)


def test_special_tokens_add_nothing(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    a, end = tiny_tokenizer("a")["input_ids"][0], tiny_tokenizer.eos_token_id
    streamed = IncrementalText(tiny_tokenizer)
    assert streamed.add([a, end, a, end]) == ["a", "", "a", ""]
    assert streamed.rest() == ""


def test_a_space_that_the_first_token_of_a_text_loses_stays_within_the_answer() -> None:
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert IncrementalText(tokenizer).add([0, 1, 2, 1]) == ["the", " cat", "s", " cat"]
