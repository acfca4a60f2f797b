"""Where texts end: at stop strings as in transformers' generate, inside an accepted block too, and at EOS ids."""

import itertools

import pytest
import torch
from conftest import make_tiny_llama
from test_decoding import Scripted
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from specdist.decoding.ends import Stops
from specdist.decoding.loop import decode
from specdist.drafters.ngram import NgramDrafter
from specdist.schema import SamplingSpec

SAMPLING = SamplingSpec(max_new_tokens=24)


def test_a_stop_string_inside_an_accepted_block_ends_the_text_where_generate_ends_it(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = make_tiny_llama(len(tiny_tokenizer))
    prompt = tiny_tokenizer("the in", add_special_tokens=False)["input_ids"]
    text = decode(target, prompt, SAMPLING, []).completion_ids
    pieces = [tiny_tokenizer.decode([token]) for token in text]
    strings_of_two = [a + b for a, b in itertools.pairwise(pieces) if (a + b).isascii()]
    assert len(strings_of_two) > 2
    for string in strings_of_two[:3]:
        strings = StopStringCriteria(tiny_tokenizer, [string, "never written"])
        expected = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stop_strings=[string, "never written"],
            tokenizer=tiny_tokenizer,
        )[0, len(prompt) :].tolist()
        assert len(expected) < 24
        for drafter in (None, Scripted([*text, 0, 0, 0, 0, 0], len(prompt)), NgramDrafter(min_ngram=1)):
            result = decode(
                target, prompt, SAMPLING, [], drafter=drafter, num_speculative_tokens=5, stop_strings=strings
            )
            assert result.completion_ids == expected
            assert result.finish_reason == "stop"
    assert decode(target, prompt, SAMPLING, [], stop_strings=StopStringCriteria(tiny_tokenizer, ["never"])).steps


@pytest.mark.parametrize(
    ("text", "fresh", "expected"),
    [
        ("a stop it", 9, "a stop"),
        ("stop more", 3, "stop more"),  # complete before what is fresh
        ("a stop stop", 4, "a stop stop"),  # the second one, which is complete at the end
        ("sto", 3, "sto"),
        ("a<|im_end|>stop", 15, "a<|im_end|>"),
    ],
)
def test_the_first_end_among_the_fresh_tokens_cuts(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, fresh: int, expected: str
) -> None:
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    stops = Stops([tiny_tokenizer.eos_token_id], StopStringCriteria(tiny_tokenizer, ["stop"]))
    ended = stops.cut(ids, min(fresh, len(ids)))
    assert tiny_tokenizer.decode(ids) == expected
    assert ended == (text != "sto" and text != "stop more")


def test_e1_e2_whichever_of_several_eos_ids_comes_first_ends_the_text() -> None:
    ids = [26194, 13, 151643, 5, 151645]
    assert Stops({151645, 151643}).cut(ids, 4)
    assert ids == [26194, 13, 151643]
    assert not Stops({151645, 151643}).cut(ids, 0)
