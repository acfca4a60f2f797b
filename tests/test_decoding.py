"""The real decoder is lossless, and replay predicts its every verify step: for draft models and for Medusa heads."""

from functools import cache

import pytest
import torch
from conftest import make_tiny_llama
from transformers import AutoModelForCausalLM, MistralConfig

from specdist.decoding.loop import DecodeResult, Step, decode
from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads import DraftHeads, HeadsOnTarget, HeadsShape, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.ngram import NgramDrafter
from specdist.drafters.prune import prune_layers
from specdist.evaluation.acceptance import DraftModelScorer, EvalSet, HeadsScorer, replay_counts, target_pass
from specdist.metrics import summarize
from specdist.schema import DistillRow, SamplingSpec

VOCAB = 40
EOS = [3, 7]


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(8, VOCAB, (5 + i % 7,), generator=generator).tolist() for i in range(count)]


def target_model():
    return make_tiny_llama(VOCAB, layers=4, seed=3)


def random_heads(kind: str, target) -> HeadsOnTarget:
    torch.manual_seed(0)
    heads = DraftHeads(HeadsShape(4, 2, target.config.hidden_size, VOCAB, kind))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return HeadsOnTarget(heads, TargetEnds.of(target))


def make_drafter(kind: str, target):
    if kind == "draft_model":
        return DraftModelDrafter(prune_layers(target, [0, 2, 3]).eval(), VOCAB)
    return HeadsDrafter(random_heads(kind, target))


def make_scorer(drafter, target):
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelScorer(drafter.model, VOCAB)
    return HeadsScorer(drafter.heads)


def eval_set(target, sampling: SamplingSpec, results: list[DecodeResult], texts: list[list[int]]) -> EvalSet:
    rows = [
        DistillRow(f"r{i:03d}", f"p{i:03d}", 0, 0, "chat", prompt, r.completion_ids, r.finish_reason, sampling, i)
        for i, (prompt, r) in enumerate(zip(texts, results, strict=True))
    ]
    with torch.inference_mode():
        return EvalSet(sampling, [target_pass(target, row, sampling) for row in rows])


@cache
def own_texts(sampling: SamplingSpec, count: int, repeats: int = 1) -> list[DecodeResult]:
    """What the target alone writes after `prompts(count)`, so often. Shared and read only."""
    target = target_model()
    return [
        decode(target, p, sampling, EOS, generator=torch.Generator().manual_seed(i))
        for i, p in enumerate(prompts(count) * repeats)
    ]


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "hydra"])
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_e5_greedy_output_is_the_targets_own_and_replay_equals_decoding_step_by_step(kind: str, gamma: int) -> None:
    target, sampling, texts = target_model(), SamplingSpec(max_new_tokens=40), prompts(20)
    drafter, plain = make_drafter(kind, target), own_texts(sampling, 20)
    fast = [decode(target, p, sampling, EOS, drafter=drafter, num_speculative_tokens=gamma) for p in texts]
    assert [r.completion_ids for r in fast] == [r.completion_ids for r in plain]
    assert {r.finish_reason for r in plain} == {"stop", "length"}, "the test must see both ends"
    replayed = replay_counts(make_scorer(drafter, target), eval_set(target, sampling, plain, texts), [gamma])
    counted = [r.counts(f"p{i:03d}", "chat", gamma) for i, r in enumerate(fast) if len(r.completion_ids) > 1]
    assert replayed["greedy", gamma] == counted
    assert sum(c.num_accepted_tokens for c in counted) > 20, "the test must see accepted drafts"


@pytest.mark.parametrize("kind", ["draft_model", "medusa"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_decoding_lies_in_the_interval_of_replay(kind: str, method: str) -> None:
    """Replay on texts of the target alone predicts the decoder's mean accepted length on other random numbers."""
    target, gamma = target_model(), 3
    sampling = SamplingSpec(temperature=0.8, max_new_tokens=24)
    drafter, texts = make_drafter(kind, target), prompts(12) * 8
    plain = own_texts(sampling, 12, 8)
    fast = [
        decode(
            target,
            p,
            sampling,
            EOS,
            drafter=drafter,
            num_speculative_tokens=gamma,
            draft_sample_method=method,
            generator=torch.Generator().manual_seed(10_000 + i),
        )
        for i, p in enumerate(texts)
    ]
    replayed = replay_counts(make_scorer(drafter, target), eval_set(target, sampling, plain, texts), [gamma])
    summary = summarize(replayed[method, gamma])
    real = summarize([r.counts(str(i), "chat", gamma) for i, r in enumerate(fast) if r.steps])
    low, high = summary.mean_accepted_length_interval
    assert low < real.mean_accepted_length < high
    assert real.num_accepted_tokens > 50


class Scripted:
    """Drafts what it is told, for exact checks of the loop's ends."""

    max_draft_tokens, tree = None, None

    def __init__(self, continuation: list[int], prompt_length: int) -> None:
        self.continuation, self.prompt_length = continuation, prompt_length

    def reset(self) -> None:
        pass

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        done = len(context.token_ids) - self.prompt_length
        return Proposal(torch.tensor(self.continuation[done : done + max_tokens], dtype=torch.long), None)

    def commit(self, num_committed: int, target_hidden: torch.Tensor) -> None:
        pass


def test_e1_eos_inside_an_accepted_block_ends_the_output_and_e10_the_limit_is_exact() -> None:
    target, prompt = target_model(), prompts(1)[0]
    text = decode(target, prompt, SamplingSpec(max_new_tokens=30), []).completion_ids
    stop = next(token for i, token in enumerate(text) if i >= 4 and token not in text[:i])
    end = text.index(stop) + 1
    drafter = Scripted([*text, 0, 0, 0, 0, 0], len(prompt))
    told: list[tuple[list[int], int]] = []
    result = decode(
        target,
        prompt,
        SamplingSpec(max_new_tokens=30),
        [stop],
        drafter=drafter,
        num_speculative_tokens=5,
        on_step=lambda token_ids, num_accepted: told.append((token_ids, num_accepted)),
    )
    assert result.completion_ids == text[:end]
    assert [token for token_ids, _ in told for token in token_ids] == text[:end]
    assert sum(num_accepted for _, num_accepted in told) == result.counts("p", "d", 5).num_accepted_tokens
    assert result.finish_reason == "stop"
    counts = result.counts("p", "d", 5)
    assert counts.num_draft_tokens == counts.num_accepted_tokens == sum(step.accepted for step in result.steps)
    assert result.steps[-1].start + result.steps[-1].drafted > end, "the last block must go on past the end"
    limited = decode(target, prompt, SamplingSpec(max_new_tokens=7), [], drafter=drafter, num_speculative_tokens=4)
    assert limited.completion_ids == text[:7]
    assert limited.finish_reason == "length"
    assert limited.steps == [Step(1, 4, 4), Step(6, 1, 1)]


def test_fully_accepted_blocks_reach_gamma_plus_one() -> None:
    target, prompt = target_model(), prompts(1)[0]
    text = decode(target, prompt, SamplingSpec(max_new_tokens=31), []).completion_ids
    result = decode(
        target,
        prompt,
        SamplingSpec(max_new_tokens=31),
        [],
        drafter=Scripted(text, len(prompt)),
        num_speculative_tokens=4,
    )
    assert summarize([result.counts("p", "d", 4)]).mean_accepted_length == 5.0


def test_e9_counts_do_not_depend_on_the_order_of_prompts() -> None:
    target, sampling = target_model(), SamplingSpec(max_new_tokens=20)
    drafter = make_drafter("draft_model", target)
    texts = prompts(6)
    run = lambda order: {  # noqa: E731
        i: decode(target, texts[i], sampling, EOS, drafter=drafter, num_speculative_tokens=3).steps for i in order
    }
    assert run(range(6)) == run(reversed(range(6)))


def test_e11_near_the_context_limit_the_output_stops_and_stays_greedy() -> None:
    target = target_model()
    target.config.max_position_embeddings = 24
    prompt = [9] * 20
    plain = decode(target, prompt, SamplingSpec(max_new_tokens=40), [])
    fast = decode(
        target,
        prompt,
        SamplingSpec(max_new_tokens=40),
        [],
        drafter=make_drafter("draft_model", target),
        num_speculative_tokens=8,
    )
    assert len(plain.completion_ids) == 4
    assert fast.completion_ids == plain.completion_ids


def test_e7_e8_what_counts_as_drafted_is_what_was_proposed_and_verified() -> None:
    """K = 5, but the drafter has fewer in its second block, and the limit leaves room for two in the last."""
    target, prompt = target_model(), prompts(1)[0]
    text = decode(target, prompt, SamplingSpec(max_new_tokens=13), []).completion_ids
    wrong = (text[9] + 1) % VOCAB
    drafter = Scripted([*text[:9], wrong], len(prompt))
    result = decode(target, prompt, SamplingSpec(max_new_tokens=13), [], drafter=drafter, num_speculative_tokens=5)
    assert result.steps == [Step(1, 5, 5), Step(7, 3, 2), *(Step(i, 0, 0) for i in (10, 11, 12))]
    counts = result.counts("p", "d", 5)
    assert (counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_drafts) == (8, 7, 5)
    limited = decode(target, prompt, SamplingSpec(max_new_tokens=9), [], drafter=drafter, num_speculative_tokens=5)
    assert [step.drafted for step in limited.steps] == [5, 2]
    assert limited.counts("p", "d", 5).num_draft_tokens == 7
    assert limited.draft_lengths() == {2: 1, 5: 1}


@pytest.mark.parametrize("drafter", [NgramDrafter(min_ngram=1), None], ids=["ngram", "draft_model"])
def test_e11_with_a_sliding_window_the_output_stays_greedy(drafter: NgramDrafter | None) -> None:
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        initializer_range=0.3,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    fast_drafter = drafter or DraftModelDrafter(prune_layers(target, [0, 2, 3]).eval(), VOCAB)
    accepted = 0
    for prompt in prompts(2):
        long = (prompt * 8)[:40]
        plain = decode(target, long, SamplingSpec(max_new_tokens=40), [])
        fast = decode(target, long, SamplingSpec(max_new_tokens=40), [], drafter=fast_drafter, num_speculative_tokens=8)
        assert fast.completion_ids == plain.completion_ids
        accepted += sum(step.accepted for step in fast.steps)
    assert accepted > 5
