"""Speed is measured at the batch size asked for, on the same texts, and not where there are no batches."""

from dataclasses import replace

import pytest
import torch
from test_batched_decoding import SMALL
from test_decoding import VOCAB, prompts, random_heads, target_model
from test_tree_decoding import TREE
from transformers import AutoModelForCausalLM, Gemma2Config

from specdist.decoding.loop import decode
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.ngram import NgramDrafter
from specdist.drafters.prune import prune_layers
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import DraftModelScorer, EvalSet, EvalText, evaluate
from specdist.evaluation.speed import _point, _shares, _Timing, _Way, measure_speed
from specdist.schema import DistillRow, SamplingSpec, Speed

SAMPLING = SamplingSpec(max_new_tokens=12)
ROWS = [
    DistillRow(f"r{i}", f"p{i}", 0, 0, "chat", prompt, [9] * 12, "length", SAMPLING, i)
    for i, prompt in enumerate(prompts(3))
]


def test_what_is_accepted_does_not_depend_on_the_batch_size() -> None:
    target = target_model()
    draft = DraftModelDrafter(prune_layers(target, [0, 2, 3]).eval(), VOCAB)
    tree = HeadsDrafter(random_heads("medusa", target), TREE)

    def measure(batch_size: int) -> Speed:
        return measure_speed(
            target, draft, ROWS, SAMPLING, [], lengths=[2], repeats=1, trees=[tree], batch_size=batch_size
        )

    alone, together = measure(1), measure(3)
    assert (alone.batch_size, together.batch_size) == (1, 3)
    assert [p.num_tree_nodes for p in together.points] == [None, TREE.num_nodes]
    lengths = [[p.mean_accepted_length for p in speed.points] for speed in (alone, together)]
    assert lengths[0] == pytest.approx(lengths[1])
    assert all(p.speedup > 0 and p.predicted_speedup > 0 for p in together.points)
    assert together.draft_cost_ratio > 0


def test_a_batch_of_more_prompts_than_there_are_is_filled_up() -> None:
    speed = measure_speed(
        target_model(), NgramDrafter(min_ngram=1), ROWS[:2], SAMPLING, [], lengths=[2], repeats=1, batch_size=3
    )
    assert (speed.batch_size, speed.num_prompts) == (3, 2)


def test_a_model_that_decodes_no_batches_is_refused() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=r"speed at batch size 2: .* one prompt after the other"):
        measure_speed(model, NgramDrafter(), ROWS, SAMPLING, [], lengths=[2], repeats=1, batch_size=2)


def test_e1_what_is_accepted_past_the_end_does_not_count() -> None:
    """A draft that is the target accepts blocks of 8; of an answer of few tokens the rest of the block is nothing."""
    target, sampling = target_model(), SamplingSpec(max_new_tokens=20)
    text = decode(target, ROWS[0].prompt_ids, sampling, []).completion_ids
    stop = next(token for i, token in enumerate(text) if i >= 2 and token not in text[:i])
    row = replace(ROWS[0], completion_ids=text[: text.index(stop) + 1], sampling=sampling)
    assert 3 <= len(row.completion_ids) < 9
    replayed = evaluate(DraftModelScorer(target, VOCAB), EvalSet(sampling, [EvalText(row)]), [8], "replay")
    speed = measure_speed(target, DraftModelDrafter(target, VOCAB), [row], sampling, [stop], lengths=[8], repeats=1)
    assert speed.points[0].mean_accepted_length == replayed[0].summary.mean_accepted_length == len(row.completion_ids)


def test_repeats_are_no_further_prompts() -> None:
    """Prompts of unlike speed-ups and a clock without noise: the interval is the same however often each is timed."""
    rows = [replace(ROWS[0], prompt_id=f"p{i // 2}", turn=i % 2) for i in range(16)]
    fast = [_Timing(50, 40.0 + 5 * (i // 2), [(50, 40.0 + 5 * (i // 2))], 25, 25, 25, 50, 5.0, 20.0) for i in range(16)]
    plain = [_Timing(50, 50.0, [(50, 50.0)], 49, 0, 49, 0, 0.0, 49.0)] * 16
    way, batches = _Way(NgramDrafter(), 2), [[row] for row in rows]
    once, often = (_point(way, batches * n, fast * n, plain * n, 1.0).speedup_interval for n in (1, 16))
    assert often == pytest.approx(once)
    halves = [_point(way, batches[i::2], fast[i::2], plain[i::2], 1.0).speedup_interval for i in (0, 1)]
    assert halves == [pytest.approx(once)] * 2, "two turns of a prompt are one unit"


def test_a_batchs_seconds_are_shared_by_the_texts_that_are_in_it() -> None:
    assert _shares([6.0, 2.0, 3.0]) == pytest.approx([2 / 3 + 1 / 2 + 3, 2 / 3, 2 / 3 + 1 / 2])
    assert sum(_shares([5.0, 5.0, 1.0, 4.0])) == pytest.approx(5.0)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_lengths_beyond_the_heads_are_timed_at_as_many_as_there_are(tree, caplog: pytest.LogCaptureFixture) -> None:
    heads = random_heads("medusa", target_model())
    trees = [] if tree is None else [HeadsDrafter(heads, tree)]
    speed = measure_speed(
        target_model(), HeadsDrafter(heads), ROWS, SAMPLING, [], lengths=[9, 7], repeats=1, trees=trees
    )
    assert [p.num_speculative_tokens for p in speed.points] == [4] + [TREE.depth] * len(trees)
    assert speed.draft_cost_ratio > 0
    assert "has 4 tokens at most" in caplog.text


def test_answers_of_one_token_alone_cannot_be_timed() -> None:
    with pytest.raises(ConfigError, match="two tokens or more"):
        measure_speed(target_model(), NgramDrafter(), ROWS, SAMPLING, list(range(VOCAB)), lengths=[2], repeats=1)
