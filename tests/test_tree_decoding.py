"""Decoding with draft trees is lossless, and replay of ranks predicts its every step: for Medusa and Hydra heads."""

import pytest
import torch
from conftest import make_tiny_llama
from test_decoding import EOS, VOCAB, eval_set, prompts, random_heads, target_model
from transformers import AutoModelForCausalLM, Gemma2Config

from specdist.decoding.loop import decode
from specdist.decoding.policies import FixedLength
from specdist.drafters.base import DecodeContext
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import HeadsScorer, TreeScorer, replay_counts
from specdist.evaluation.certify import certify_greedy, certify_sampled
from specdist.metrics import summarize
from specdist.replay import greedy_steps
from specdist.schema import SamplingSpec
from specdist.target import forward_block, keep_fed, new_cache
from specdist.tree import DraftTree, block_attention
from specdist.verify import TypicalAcceptance, served_logprobs

TREE = DraftTree.of([[i] for i in range(6)] + [[i, j] for i in range(3) for j in range(4)] + [[0, 0, 0], [1, 2, 0]], 4)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_e5_a_trees_output_is_the_targets_own_and_replay_equals_decoding_step_by_step(kind: str) -> None:
    target, sampling = target_model(), SamplingSpec(max_new_tokens=40)
    heads, texts = random_heads(kind, target), prompts(20)
    drafter, scorer = HeadsDrafter(heads, TREE), TreeScorer(HeadsScorer(heads), TREE)
    plain = [decode(target, p, sampling, EOS) for p in texts]
    fast = [decode(target, p, sampling, EOS, drafter=drafter, num_speculative_tokens=TREE.depth) for p in texts]
    assert [r.completion_ids for r in fast] == [r.completion_ids for r in plain]
    accepted = 0
    for text, result in zip(eval_set(target, sampling, plain, texts).texts, fast, strict=True):
        length = len(text.row.completion_ids)
        accept = scorer.accept(text, sampling)["greedy"]
        assert result.steps_in_text() == greedy_steps(accept, length, TREE.depth)
        accepted += sum(s.accepted for s in result.steps)
    chain = [decode(target, p, sampling, EOS, drafter=HeadsDrafter(heads), num_speculative_tokens=3) for p in texts]
    assert accepted > 20 + sum(s.accepted for r in chain for s in r.steps), "other ranks than the best were accepted"


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_tree_is_certified_as_a_chain_is(kind: str) -> None:
    target, texts = target_model(), prompts(12)
    heads = random_heads(kind, target)
    drafter, scorer = HeadsDrafter(heads, TREE), TreeScorer(HeadsScorer(heads), TREE)
    for sampling in (SamplingSpec(max_new_tokens=30), SamplingSpec(temperature=0.8, max_new_tokens=30)):
        own = [
            decode(target, p, sampling, EOS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(texts)
        ]
        texts_of = eval_set(target, sampling, own, texts)
        if sampling.is_greedy:
            certification, fidelity = certify_greedy(target, drafter, scorer, texts_of, TREE.depth, EOS)
            assert fidelity.passed
        else:
            certification = certify_sampled(target, drafter, scorer, texts_of, TREE.depth, EOS, "greedy")
        assert certification.passed
        assert certification.decoder_mean_accepted_length > 1.2


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_sampled_chain_of_hydra_heads_is_certified(method: str) -> None:
    target, texts, sampling = target_model(), prompts(60), SamplingSpec(temperature=0.8, max_new_tokens=24)
    heads = random_heads("hydra", target)
    own = [decode(target, p, sampling, EOS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(texts)]
    certification = certify_sampled(
        target, HeadsDrafter(heads), HeadsScorer(heads), eval_set(target, sampling, own, texts), 3, EOS, method
    )
    assert certification.passed
    assert certification.decoder_mean_accepted_length > 1.03


def test_sampled_replay_of_the_targets_text_is_within_the_decoders_interval() -> None:
    target, sampling, texts = target_model(), SamplingSpec(temperature=0.9, max_new_tokens=40), prompts(60)
    heads = random_heads("medusa", target)
    own, fast = (
        [
            decode(
                target,
                p,
                sampling,
                EOS,
                drafter=drafter,
                num_speculative_tokens=TREE.depth,
                generator=torch.Generator().manual_seed(seed + i),
            )
            for i, p in enumerate(texts)
        ]
        for drafter, seed in ((None, 0), (HeadsDrafter(heads, TREE), 10_000))
    )
    replayed = replay_counts(TreeScorer(HeadsScorer(heads), TREE), eval_set(target, sampling, own, texts), [TREE.depth])
    summary = summarize(replayed["greedy", TREE.depth])
    real = summarize([r.counts(str(i), "chat", TREE.depth) for i, r in enumerate(fast) if r.steps])
    low, high = summary.mean_accepted_length_interval
    assert low < real.mean_accepted_length < high


def test_the_cache_holds_the_accepted_path_alone() -> None:
    target, tree = target_model(), DraftTree.of([[0], [1], [0, 0], [1, 0]], 2)
    prompt, nodes = [9, 10, 11, 12], [20, 21, 22, 23]
    cache = new_cache(target)
    forward_block(target, prompt[:-1], cache)
    hidden, _ = forward_block(target, [prompt[-1], *nodes], cache, visible=block_attention(torch.tensor(tree.parents)))
    keep_fed(cache, len(nodes), [1, 3])  # the path 21, 23
    plain = new_cache(target)
    expected, _ = forward_block(target, [*prompt, 21, 23], plain)
    torch.testing.assert_close(hidden[[0, 2, 4]], expected[-3:])
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_candidates_that_are_drawn_are_distinct_and_come_with_what_they_were_drawn_from(kind: str) -> None:
    """Each node's distribution is its head's as served, without the siblings before it."""
    target, sampling = target_model(), SamplingSpec(temperature=0.8, top_p=0.95)
    heads = random_heads(kind, target)
    drafter, hidden, newest = HeadsDrafter(heads, TREE), torch.randn(32), 9
    drafter.commit(1, hidden)
    proposal = drafter.propose(DecodeContext([newest], sampling, torch.Generator().manual_seed(0)), TREE.depth)
    ids, number = proposal.token_ids.tolist(), {path: i for i, path in enumerate(TREE.paths)}
    assert proposal.parents.tolist() == list(TREE.parents)
    for path, drawn_from in zip(TREE.paths, proposal.probs, strict=True):
        above = [newest, *(ids[number[path[:depth]]] for depth in range(1, len(path)))]
        served = served_logprobs(heads.logits(len(path) - 1, hidden[None], torch.tensor([above])), sampling).exp()[0]
        before = [ids[number[(*path[:-1], rank)]] for rank in range(path[-1]) if (*path[:-1], rank) in number]
        if len(before) == path[-1]:  # of (1, 2, 0) the siblings before 2 are nodes as well
            served[before] = 0.0
            torch.testing.assert_close(drawn_from, served / served.sum())
            assert ids[number[path]] not in before
            assert drawn_from[ids[number[path]]] > 0


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_e5_a_drawn_tree_near_temperature_zero_gives_the_greedy_output(kind: str) -> None:
    """As cold as this the draws are the best tokens: all but one candidate of a node have nothing left to be."""
    target = target_model()
    drafter = HeadsDrafter(random_heads(kind, target), TREE)
    cold = SamplingSpec(temperature=1e-4, max_new_tokens=40)
    for prompt in prompts(8):
        plain = decode(target, prompt, SamplingSpec(max_new_tokens=40), EOS)
        drawn = decode(
            target,
            prompt,
            cold,
            EOS,
            drafter=drafter,
            num_speculative_tokens=TREE.depth,
            draft_sample_method="probabilistic",
        )
        assert drawn.completion_ids == plain.completion_ids
        assert len(drawn.steps) <= len(plain.steps)


def test_a_tree_is_not_cut_short_by_its_drafters_confidence() -> None:
    target = target_model()
    drafter = HeadsDrafter(random_heads("medusa", target), TREE)
    with pytest.raises(ConfigError, match="confidence threshold with a draft tree"):
        decode(
            target,
            [9, 10],
            SamplingSpec(max_new_tokens=4),
            EOS,
            drafter=drafter,
            policy=FixedLength(3, confidence_threshold=0.4),
        )


def test_typical_acceptance_is_marked_and_needs_a_temperature() -> None:
    target, prompt = target_model(), prompts(1)[0]
    drafter, hot = HeadsDrafter(random_heads("medusa", target), TREE), SamplingSpec(1.0, max_new_tokens=30)
    lossy, lossless = (
        decode(target, prompt, hot, [], drafter=drafter, num_speculative_tokens=TREE.depth, typical=typical)
        for typical in (TypicalAcceptance(), None)
    )
    assert (lossy.lossless, lossless.lossless) == (False, True)
    assert len(lossy.completion_ids) == 30
    with pytest.raises(ConfigError, match="typical acceptance at temperature 0"):
        decode(target, prompt, SamplingSpec(), [], drafter=drafter, typical=TypicalAcceptance())


def test_a_target_with_a_sliding_window_is_refused_before_decoding() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
    )
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    heads = random_heads("medusa", target)
    with pytest.raises(ConfigError, match="a chain works: draft without a tree"):
        decode(
            target,
            [9, 10],
            SamplingSpec(max_new_tokens=4),
            EOS,
            drafter=HeadsDrafter(heads, TREE),
            num_speculative_tokens=3,
        )
    chain, sampling = HeadsDrafter(heads), SamplingSpec(max_new_tokens=4)
    assert len(decode(target, [9, 10], sampling, [], drafter=chain, num_speculative_tokens=3).completion_ids) == 4


def test_e12_a_tree_for_more_heads_than_there_are_never_drafts() -> None:
    with pytest.raises(ConfigError, match="5 levels, but there are 4 heads"):
        HeadsDrafter(random_heads("medusa", make_tiny_llama(VOCAB)), DraftTree.chain(5))
