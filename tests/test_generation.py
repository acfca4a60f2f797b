"""Writing with the target: encoding, stop ids, and draws that belong to a row and follow the served distribution."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from specdist.errors import ConfigError
from specdist.generation import cache
from specdist.generation.engine import Answer, Request
from specdist.generation.hf import TransformersEngine
from specdist.schema import SamplingSpec
from specdist.verify import served_logprobs

PROMPTS = [[72, 101, 108], [84, 104, 101, 32, 99, 97, 116], [65], [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60]]
SEEDS = [11, 2**40, 13, 14]
GREEDY = SamplingSpec(max_new_tokens=24)
SAMPLED = SamplingSpec(temperature=0.8, top_k=50, top_p=0.9, max_new_tokens=24)
EOS = [266, 267, *range(20)]  # many, so that rows end at different steps
MANY = [[(31 * i + 7 * j) % 256 for j in range(1 + i * 13 % 40)] for i in range(40)]


def write(
    model: PreTrainedModel, prompts: list[list[int]], sampling: SamplingSpec | list[SamplingSpec], seeds: list[int],
    eos: list[int], *, pad: int = 265, rows: int = 8, tokens: int = 1024, best: int = 0,
) -> list[Answer]:  # fmt: skip
    """Answers in the order of `prompts`, which the engine gets longest first."""
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    engine = TransformersEngine(
        model, eos_token_ids=eos, pad_token_id=pad, max_batch_rows=rows, max_batch_tokens=tokens, num_top_logprobs=best
    )
    requests = [Request(str(i), *of) for i, of in enumerate(zip(prompts, samplings, seeds, strict=True))]
    waiting = iter(sorted(requests, key=lambda request: -len(request.prompt_ids)))
    answers = {answer.request.key: answer for answer in engine.answers(lambda: next(waiting, None))}
    return [answers[request.key] for request in requests]


def generate(*args: Any, **kwargs: Any) -> list[tuple[list[int], str]]:
    """Completion ids and finish reasons of `write`."""
    return [(answer.completion_ids, answer.finish_reason) for answer in write(*args, **kwargs)]


@pytest.fixture
def transformers_log() -> Iterator[list[logging.LogRecord]]:
    """What transformers would show: its logger does not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    yield records
    logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_the_batch(tiny_model: LlamaForCausalLM, sampling: SamplingSpec):
    together = generate(tiny_model, PROMPTS, sampling, SEEDS, EOS)
    alone = [generate(tiny_model, [p], sampling, [s], EOS)[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    backwards = generate(tiny_model, PROMPTS[::-1], sampling, SEEDS[::-1], EOS)[::-1]
    assert together == alone == backwards
    assert len({len(ids) for ids, _ in together}) > 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [cache.InPlaceBatch, cache.LockstepBatch])
def test_rows_that_join_and_leave_do_not_change_others(
    tiny_model: LlamaForCausalLM,
    sampling: SamplingSpec,
    batch: Callable[..., cache.Batch],
    monkeypatch: pytest.MonkeyPatch,
):
    seeds = list(range(len(MANY)))
    alone = generate(tiny_model, MANY, sampling, seeds, EOS, rows=1)
    assert {"stop", "length"} == {reason for _, reason in alone}
    monkeypatch.setattr("specdist.generation.hf.new_batch", batch)
    for rows, tokens in ((7, 10_000), (32, 480)):
        assert generate(tiny_model, MANY, sampling, seeds, EOS, rows=rows, tokens=tokens) == alone


def test_rows_of_different_samplings_share_a_batch(tiny_model: LlamaForCausalLM):
    kinds = [GREEDY, SAMPLED, replace(SAMPLED, temperature=1.5, max_new_tokens=9), replace(GREEDY, max_new_tokens=3)]
    samplings = [kinds[i % 4] for i in range(len(MANY))]
    seeds = list(range(len(MANY)))
    apart = [generate(tiny_model, [MANY[i]], samplings[i], [i], EOS)[0] for i in seeds]
    assert generate(tiny_model, MANY, samplings, seeds, EOS, rows=16) == apart


def test_answers_lead_to_further_requests(tiny_model: LlamaForCausalLM):
    """Every conversation goes on for three turns; a later turn is longer than all before it."""
    queue = [Request(f"{i}.0", prompt, GREEDY, 0) for i, prompt in enumerate(PROMPTS)]
    engine = TransformersEngine(tiny_model, eos_token_ids=EOS, pad_token_id=265, max_batch_rows=3, max_batch_tokens=300)
    done: dict[str, Answer] = {}
    for answer in engine.answers(lambda: queue.pop(0) if queue else None):
        done[answer.request.key] = answer
        conversation, turn = answer.request.key.split(".")
        if turn != "2":
            ids = [*answer.request.prompt_ids, *answer.completion_ids, *range(60, 80)]
            queue.append(Request(f"{conversation}.{int(turn) + 1}", ids, GREEDY, 0))
    assert len(done) == 3 * len(PROMPTS)
    for answer in done.values():
        assert [(answer.completion_ids, answer.finish_reason)] == generate(
            tiny_model, [answer.request.prompt_ids], GREEDY, [0], EOS
        )


def test_the_cache_keeps_within_its_tokens_and_rows(tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch):
    shapes = []
    join = cache.InPlaceBatch.join

    def watched(self: cache.InPlaceBatch, prompts: list[list[int]], places: int, width: int) -> None:
        join(self, prompts, places, width)
        shapes.append((self.span.rows, *self.layers[0].keys.shape))

    monkeypatch.setattr(cache.InPlaceBatch, "join", watched)
    prompts = [[65] * 120, [66] * 110, *MANY]
    generate(tiny_model, prompts, GREEDY, list(range(len(prompts))), EOS, rows=9, tokens=400)
    assert all(rows <= places <= 9 and places * width <= 400 for rows, places, _, width, _ in shapes)
    assert {places for _, places, *_ in shapes} >= {2, 6}  # more rows as the prompts become shorter
    assert max(rows for rows, *_ in shapes) == 6


def test_a_request_larger_than_the_cache_is_an_error(tiny_model: LlamaForCausalLM):
    with pytest.raises(ConfigError, match="comes to 64 tokens, the batch has room for 63"):
        generate(tiny_model, [[65] * 40], GREEDY, [0], EOS, tokens=63)


def test_without_requests_there_are_no_answers(tiny_model: LlamaForCausalLM):
    assert generate(tiny_model, [], GREEDY, [], EOS) == []


SMALL: dict[str, Any] = dict(
    vocab_size=268, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "in_place"),
    [
        (GPTNeoXConfig(**SMALL), True),
        (Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8), True),
        (Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, attn_implementation="eager"), True),
        (MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8), False),
        (Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8), False),
        (BloomConfig(vocab_size=268, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3), False),
    ],
    ids=["gpt-neox", "qwen3", "qwen3-eager", "mistral-sliding", "gemma2-alternating", "bloom-alibi"],
)
def test_every_kind_of_model_writes_what_its_own_generate_writes(config: PretrainedConfig, in_place: bool):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
    assert isinstance(cache.new_batch(model, 0), cache.InPlaceBatch) == in_place
    prompts = MANY[:12]
    own = [
        model.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False, eos_token_id=EOS, pad_token_id=0)
        for p in prompts
    ]
    expected = [ids[0, len(p) :].tolist() for p, ids in zip(prompts, own, strict=True)]
    assert [ids for ids, _ in generate(model, prompts, GREEDY, list(range(12)), EOS, rows=5)] == expected


def test_best_tokens_equal_those_of_one_pass_over_the_text(tiny_model: LlamaForCausalLM):
    for answer in write(tiny_model, MANY[:9], SAMPLED, list(range(9)), EOS, rows=4, best=5):
        ids = [*answer.request.prompt_ids, *answer.completion_ids]
        logprobs = tiny_model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[len(answer.request.prompt_ids) - 1 : -1].topk(5)
        assert answer.top is not None
        assert answer.top.ids == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(answer.top.logprobs), expected.values, atol=1e-4, rtol=0)
    assert write(tiny_model, MANY[:1], GREEDY, [0], EOS)[0].top is None


def test_greedy_equals_step_by_step_argmax(tiny_model: LlamaForCausalLM):
    for prompt, (completion, reason) in zip(PROMPTS, generate(tiny_model, PROMPTS, GREEDY, SEEDS, EOS), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 24 and not (len(ids) > len(prompt) and ids[-1] in EOS):
            ids.append(int(tiny_model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert completion == ids[len(prompt) :]
        assert reason == ("stop" if ids[-1] in EOS else "length")


def test_seeds_decide_the_draws(tiny_model: LlamaForCausalLM):
    first, second = generate(tiny_model, [PROMPTS[0]] * 2, SAMPLED, [1, 2], [])
    assert first != second
    assert generate(tiny_model, [PROMPTS[0]], SAMPLED, [2], []) == [second]


@pytest.mark.parametrize("pad", [265, 267])
def test_e2_every_stop_id_is_honoured(tiny_model: LlamaForCausalLM, pad: int):
    (free, reason), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [], pad=pad)
    assert (len(free), reason) == (24, "length")
    for stop in (free[2], free[7]):
        end = free.index(stop) + 1
        results = generate(tiny_model, PROMPTS, GREEDY, SEEDS, [267, stop], pad=pad)
        assert results[0] == (free[:end], "stop")
        assert all(not {267, stop}.intersection(ids[:-1]) for ids, _ in results)


def test_m5_the_generated_eos_is_kept_when_it_is_the_padding_id(tiny_model: LlamaForCausalLM):
    (free, _), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [])
    stop = free[3]
    results = generate(tiny_model, PROMPTS, GREEDY, SEEDS, [stop], pad=stop)
    assert results[0] == (free[: free.index(stop) + 1], "stop")
    assert any(reason == "length" and len(ids) == 24 for ids, reason in results)


def test_d9_the_last_allowed_token_may_be_the_eos(tiny_model: LlamaForCausalLM):
    (free, _), *_ = generate(tiny_model, PROMPTS[:1], GREEDY, SEEDS[:1], [])
    end = next(i for i in range(4, 24) if free[i] not in free[:i])
    cut = SamplingSpec(max_new_tokens=end)
    whole = SamplingSpec(max_new_tokens=end + 1)
    assert generate(tiny_model, PROMPTS[:1], cut, SEEDS[:1], [free[end]]) == [(free[:end], "length")]
    assert generate(tiny_model, PROMPTS[:1], whole, SEEDS[:1], [free[end]]) == [(free[: end + 1], "stop")]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_models_own_generation_defaults_do_not_leak_in(
    tiny_model: LlamaForCausalLM,
    sampling: SamplingSpec,
    transformers_log: list[logging.LogRecord],
    capfd: pytest.CaptureFixture[str],
):
    expected = generate(tiny_model, PROMPTS, sampling, SEEDS, EOS)
    own = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=3, repetition_penalty=5.0, max_length=12, min_new_tokens=20,
        no_repeat_ngram_size=2, eos_token_id=33, pad_token_id=33, bos_token_id=1, num_return_sequences=1,
        suppress_tokens=[expected[0][0][0]], return_dict_in_generate=True, use_cache=False,
    )  # fmt: skip
    tiny_model.generation_config = own
    assert generate(tiny_model, PROMPTS, sampling, SEEDS, EOS) == expected
    assert tiny_model.generation_config is own
    assert not [record.getMessage() for record in transformers_log]
    assert capfd.readouterr() == ("", "")


def test_e11_length_beyond_the_positions_is_an_error(tiny_model: LlamaForCausalLM):
    with pytest.raises(ConfigError, match="513 tokens, the target has 512 positions"):
        generate(tiny_model, [[65] * 489], GREEDY, [0], EOS)


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
    answers = [
        ids
        for ids, _ in generate(model, [prompt] * 3000, sampling, list(range(3000)), [], pad=0, rows=500, tokens=2500)
    ]
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
