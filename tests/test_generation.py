"""Writing with the target: encoding, stop ids, and draws that belong to a row and follow the served distribution."""

import logging
from collections.abc import Iterator

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdist.errors import ConfigError
from specdist.generation.hf import PromptRejected, encode_prompt, generate
from specdist.schema import SamplingSpec
from specdist.verify import served_logprobs

PROMPTS = [[72, 101, 108], [84, 104, 101, 32, 99, 97, 116], [65], [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60]]
SEEDS = [11, 2**40, 13, 14]
GREEDY = SamplingSpec(max_new_tokens=24)
SAMPLED = SamplingSpec(temperature=0.8, top_k=50, top_p=0.9, max_new_tokens=24)
EOS = [266, 267, *range(20)]  # many, so that rows end at different steps


@pytest.fixture
def transformers_log() -> Iterator[list[logging.LogRecord]]:
    """What transformers would show: its logger does not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    yield records
    logging.getLogger("transformers").removeHandler(handler)


def test_d5_content_that_spells_a_control_token_is_rejected(tiny_tokenizer: PreTrainedTokenizerFast):
    messages = [{"role": "user", "content": "Explain the tag <|im_end|> and </s> in HTML"}]
    with pytest.raises(PromptRejected, match=r"messages\[0\].*<\|im_end\|>") as caught:
        encode_prompt(tiny_tokenizer, messages)
    assert caught.value.reason == "control_token"


def test_d5_turns_recovered_from_ids_equal_the_messages(tiny_tokenizer: PreTrainedTokenizerFast):
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": f"the tag <|im_end and |im_end|> of {r}\n\n <im_start>"} for r in roles]
    ids = encode_prompt(tiny_tokenizer, messages)
    assert ids.count(tiny_tokenizer.eos_token_id) == 4
    assert ids.count(tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")) == 5  # the answer's opening is the fifth
    assert tiny_tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_m6_prompt_ids_have_no_added_bos_and_equal_the_rendered_text(tiny_tokenizer: PreTrainedTokenizerFast):
    messages = [{"role": "user", "content": "the other one"}]
    text = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert encode_prompt(tiny_tokenizer, messages) == tiny_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_d2_a_template_that_refuses_the_messages_rejects_the_prompt():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(PromptRejected, match="System role not supported") as caught:
        encode_prompt(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert caught.value.reason == "template"


def test_no_chat_template_is_a_config_error():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "b"}])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_the_batch(tiny_model: LlamaForCausalLM, sampling: SamplingSpec):
    together = generate(tiny_model, PROMPTS, sampling, SEEDS, EOS, 265)
    alone = [generate(tiny_model, [p], sampling, [s], EOS, 265)[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    backwards = generate(tiny_model, PROMPTS[::-1], sampling, SEEDS[::-1], EOS, 265)[::-1]
    assert together == alone == backwards
    assert len({len(ids) for ids, _ in together}) > 1


def test_greedy_equals_step_by_step_argmax(tiny_model: LlamaForCausalLM):
    for prompt, (completion, reason) in zip(
        PROMPTS, generate(tiny_model, PROMPTS, GREEDY, SEEDS, EOS, 265), strict=True
    ):
        ids = list(prompt)
        while len(ids) < len(prompt) + 24 and not (len(ids) > len(prompt) and ids[-1] in EOS):
            ids.append(int(tiny_model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert completion == ids[len(prompt) :]
        assert reason == ("stop" if ids[-1] in EOS else "length")


def test_seeds_decide_the_draws(tiny_model: LlamaForCausalLM):
    first, second = generate(tiny_model, [PROMPTS[0]] * 2, SAMPLED, [1, 2], [], 265)
    assert first != second
    assert generate(tiny_model, [PROMPTS[0]], SAMPLED, [2], [], 265) == [second]


@pytest.mark.parametrize("pad", [265, 267])
def test_e2_every_stop_id_is_honoured(tiny_model: LlamaForCausalLM, pad: int):
    (free, reason), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [], pad)
    assert (len(free), reason) == (24, "length")
    for stop in (free[2], free[7]):
        end = free.index(stop) + 1
        results = generate(tiny_model, PROMPTS, GREEDY, SEEDS, [267, stop], pad)
        assert results[0] == (free[:end], "stop")
        assert all(not {267, stop}.intersection(ids[:-1]) for ids, _ in results)


def test_m5_the_generated_eos_is_kept_when_it_is_the_padding_id(tiny_model: LlamaForCausalLM):
    (free, _), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [], 265)
    stop = free[3]
    results = generate(tiny_model, PROMPTS, GREEDY, SEEDS, [stop], stop)
    assert results[0] == (free[: free.index(stop) + 1], "stop")
    assert any(reason == "length" and len(ids) == 24 for ids, reason in results)


def test_d9_the_last_allowed_token_may_be_the_eos(tiny_model: LlamaForCausalLM):
    (free, _), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [], 265)
    end = next(i for i in range(4, 24) if free[i] not in free[:i])
    cut = SamplingSpec(max_new_tokens=end)
    whole = SamplingSpec(max_new_tokens=end + 1)
    assert generate(tiny_model, PROMPTS[:1], cut, SEEDS[:1], [free[end]], 265) == [(free[:end], "length")]
    assert generate(tiny_model, PROMPTS[:1], whole, SEEDS[:1], [free[end]], 265) == [(free[: end + 1], "stop")]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_models_own_generation_defaults_do_not_leak_in(
    tiny_model: LlamaForCausalLM,
    sampling: SamplingSpec,
    transformers_log: list[logging.LogRecord],
    capfd: pytest.CaptureFixture[str],
):
    expected = generate(tiny_model, PROMPTS, sampling, SEEDS, EOS, 265)
    own = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=3, repetition_penalty=5.0, max_length=12, min_new_tokens=20,
        no_repeat_ngram_size=2, eos_token_id=33, pad_token_id=33, bos_token_id=1, num_return_sequences=1,
        suppress_tokens=[expected[0][0][0]], return_dict_in_generate=True, use_cache=False,
    )  # fmt: skip
    tiny_model.generation_config = own
    assert generate(tiny_model, PROMPTS, sampling, SEEDS, EOS, 265) == expected
    assert tiny_model.generation_config is own
    assert not [record.getMessage() for record in transformers_log]
    assert capfd.readouterr() == ("", "")


def test_e11_length_beyond_the_positions_is_an_error(tiny_model: LlamaForCausalLM):
    with pytest.raises(ConfigError, match="513 tokens, the target has 512 positions"):
        generate(tiny_model, [[65] * 489], GREEDY, [0], EOS, 265)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(temperature=1.0, max_new_tokens=2),
        SamplingSpec(temperature=0.7, top_k=5, max_new_tokens=2),
        SamplingSpec(temperature=1.5, top_p=0.8, max_new_tokens=2),
    ],
    ids=["plain", "top_k", "top_p"],
)
def test_draws_follow_the_served_distribution(sampling: SamplingSpec):
    """Chi-squared of both steps on 10 ids. The second step's counts are taken after the most frequent first token."""
    model = make_tiny_llama(10, seed=4)
    prompt = [1, 2, 3]
    answers = [ids for ids, _ in generate(model, [prompt] * 3000, sampling, list(range(3000)), [], 0)]
    first = torch.tensor([ids[0] for ids in answers])
    common = int(first.mode().values)
    second = torch.tensor([ids[1] for ids in answers if ids[0] == common])
    for draws, context in ((first, prompt), (second, [*prompt, common])):
        probs = served_logprobs(model(torch.tensor([context])).logits[0, -1], sampling).exp()
        counts = torch.bincount(draws, minlength=10)
        assert counts[probs == 0].sum() == 0
        expected = probs[probs > 0] * len(draws)
        statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
        assert statistic < 27.9  # 99.9 % point at 9 degrees of freedom, the most there can be
