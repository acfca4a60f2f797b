"""Texts that are decoded together come out as each does alone: its tokens, its end, its every verify step."""

from functools import cache

import pytest
import torch
from conftest import make_tiny_llama, make_tiny_tokenizer
from test_decoding import EOS, VOCAB, make_drafter, prompts, random_heads, target_model
from test_tree_decoding import TREE
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPTNeoXConfig, Qwen3Config, StopStringCriteria

from specdist.decoding.loop import DecodeResult, decode, decode_batch
from specdist.decoding.policies import ByLastBlock, FixedLength
from specdist.drafters.base import Drafter
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.ngram import NgramDrafter
from specdist.in_place import InPlaceBatch, fits_in_place
from specdist.schema import SamplingSpec

KINDS = ["target alone", "ngram", "draft_model", "medusa", "hydra", "medusa tree", "hydra tree"]
GREEDY = SamplingSpec(max_new_tokens=24)
TEXTS = [[9], *prompts(6), prompts(1)[0] * 6]  # 1 to 30 tokens


@cache
def drafter_of(kind: str) -> Drafter | None:
    if kind == "target alone":
        return None
    if kind == "ngram":
        return NgramDrafter(min_ngram=1)
    if kind.endswith("tree"):
        return HeadsDrafter(random_heads(kind.split()[0], target_model()), TREE)
    return make_drafter(kind, target_model())


def seeded(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + i) for i in range(count)]


def told(results: list[DecodeResult]) -> list[tuple]:
    return [(r.completion_ids, r.finish_reason, r.steps, r.lossless) for r in results]


def together_and_alone(
    texts: list[list[int]], sampling: SamplingSpec, drafter: Drafter | None, model=None, make_policy=None, **options
) -> tuple[list[tuple], list[tuple]]:
    """`told` of texts in one batch, and of each by itself with the same seed."""
    model, make_policy = model or target_model(), make_policy or (lambda: FixedLength(3))
    options = {"eos_token_ids": EOS, "drafter": drafter} | options
    batch = decode_batch(model, texts, sampling, policy=make_policy, generators=seeded(len(texts)), **options)
    alone = [
        decode(model, text, sampling, policy=make_policy(), generator=generator, **options)
        for text, generator in zip(texts, seeded(len(texts)), strict=True)
    ]
    return told(batch), told(alone)


@pytest.mark.parametrize("kind", KINDS)
def test_e17_e5_greedy_rows_of_unequal_lengths_equal_single_decoding(kind: str) -> None:
    batch, alone = together_and_alone(TEXTS, GREEDY, drafter_of(kind))
    assert batch == alone
    assert {reason for _, reason, *_ in batch} == {"stop", "length"}, "rows must leave while others go on"
    if kind != "target alone":
        assert sum(step.accepted for _, _, steps, _ in batch for step in steps) > 3
    for size in (0, 1, 3):
        few = decode_batch(
            target_model(), TEXTS[:size], GREEDY, EOS, drafter=drafter_of(kind), num_speculative_tokens=3
        )
        assert told(few) == alone[:size]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("target alone", "greedy"),
        ("draft_model", "probabilistic"),
        ("medusa", "greedy"),
        ("medusa", "probabilistic"),
        ("medusa tree", "greedy"),
        ("hydra tree", "probabilistic"),
    ],
)
def test_a_sampled_row_does_not_depend_on_its_neighbours(kind: str, method: str) -> None:
    sampling = SamplingSpec(1.0, top_p=0.9, max_new_tokens=16)
    batch, alone = together_and_alone(TEXTS[5:], sampling, drafter_of(kind), draft_sample_method=method)
    assert batch == alone


@pytest.mark.parametrize("kind", ["draft_model", "medusa"])
def test_rows_whose_blocks_differ_in_length_equal_single_decoding(kind: str) -> None:
    """Each has its own policy, and a block ends where the draft is unsure."""
    for sampling, make_policy in (
        (GREEDY, lambda: ByLastBlock(2, 1, 4)),
        (SamplingSpec(0.8, max_new_tokens=16), lambda: FixedLength(4, confidence_threshold=0.2)),
    ):
        batch, alone = together_and_alone(
            TEXTS[5:], sampling, drafter_of(kind), make_policy=make_policy, draft_sample_method="probabilistic"
        )
        assert batch == alone
        assert len({step.drafted for _, _, steps, _ in batch for step in steps}) > 1


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "medusa tree"])
def test_e10_e11_rows_end_at_their_own_limits(kind: str) -> None:
    """Some at the model's last position, which an absolute embedding must not exceed, one at the limit of 9 tokens."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    drafter: Drafter = NgramDrafter(min_ngram=1)
    if kind == "draft_model":
        drafter = DraftModelDrafter(model, VOCAB)
    elif kind == "medusa tree":
        drafter = HeadsDrafter(random_heads("medusa", model), TREE)
    texts = [[9, 10, 11] * 10, [8] * 4, [12, 13] * 14, [9] * 31]
    batch, alone = together_and_alone(texts, SamplingSpec(max_new_tokens=9), drafter, model, eos_token_ids=[])
    assert batch == alone
    assert [len(ids) for ids, *_ in batch] == [2, 9, 4, 1]


def test_e1_rows_end_at_stop_strings_inside_a_block() -> None:
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_llama(len(tokenizer), seed=3)
    texts = [tokenizer.encode(text) for text in ("The quick", "a", "What is the name of it? ")]
    plain, _ = together_and_alone(texts, GREEDY, None, model)
    stops = [tokenizer.decode(ids[i : i + 2]) for (ids, *_), i in zip(plain[:2], (5, 11), strict=True)]
    criteria = StopStringCriteria(tokenizer, stops)
    drafter = DraftModelDrafter(model, len(tokenizer))
    batch, alone = together_and_alone(texts, GREEDY, drafter, model, stop_strings=criteria)
    assert batch == alone
    assert {reason for _, reason, *_ in batch} == {"stop", "length"}


SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip


@pytest.mark.parametrize("config", [
    GPTNeoXConfig(**SMALL), Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
    Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8),
], ids=lambda config: config.model_type)  # fmt: skip
def test_e17_other_kinds_of_models_equal_single_decoding(config) -> None:
    """One whose layers have a sliding window decodes one text after the other, and drafts so."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert fits_in_place(model) == (config.model_type != "gemma2")
    drafters = [DraftModelDrafter(model, VOCAB), HeadsDrafter(random_heads("medusa", model))]
    if fits_in_place(model):
        drafters.append(HeadsDrafter(random_heads("medusa", model), TREE))
    for drafter in drafters:
        batch, alone = together_and_alone(TEXTS[5:], GREEDY, drafter, model)
        assert batch == alone


def test_a_draft_with_a_sliding_window_drafts_for_rows_one_by_one() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8)
    ).eval()
    batch, alone = together_and_alone(TEXTS[5:], GREEDY, DraftModelDrafter(model, VOCAB))
    assert batch == alone


def test_blocks_of_unequal_lengths_reach_beyond_the_room_that_was_laid_out() -> None:
    """The cache grows, and a row that is cut short goes on as if what was cut had never been fed."""
    model, texts = target_model(), [[9, 10, 11, 12, 13, 14, 15, 16], [20, 21]]
    batch = InPlaceBatch(model, pad_token_id=0)
    batch.join(texts, 2, 8)
    batch.feed([[16, 30, 31], [21]], [7, 1])
    blocks = [[40 % VOCAB, 17], [22, 23, 24]]
    logits = batch.feed(blocks, [8, 2]).logits
    for row, (text, block) in enumerate(zip(texts, blocks, strict=True)):
        expected = model(torch.tensor([text + block])).logits[0, -len(block) :]
        torch.testing.assert_close(logits[row, : len(block)], expected)
    assert batch.span.width == 32
