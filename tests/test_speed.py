"""Speed is measured at the batch size asked for, on the same texts, and not where there are no batches."""

import pytest
import torch
from test_batched_decoding import SMALL
from test_decoding import VOCAB, prompts, random_heads, target_model
from test_tree_decoding import TREE
from transformers import AutoModelForCausalLM, Gemma2Config

from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.ngram import NgramDrafter
from specdist.drafters.prune import prune_layers
from specdist.errors import ConfigError
from specdist.evaluation.speed import measure_speed
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
