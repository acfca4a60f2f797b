"""transformers' assisted generation with an exported draft model gives the target's greedy tokens."""

from pathlib import Path

import torch
from conftest import make_tiny_llama
from transformers import AutoModelForCausalLM

from scripts.check_assisted import compare
from specdist.export.draft_model import export_draft_model
from specdist.target import open_target

PROMPTS = {"a": [5, 6, 7, 8], "b": list(range(20, 40))}


def test_assisted_generation_gives_the_targets_tokens_in_fewer_passes(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = open_target(str(tiny_target_dir))
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()
    seeds = {"the target itself": 0, "a stranger": 9}
    results = {}
    for name, seed in seeds.items():
        draft = make_tiny_llama(target.identity.vocab_size, seed=seed)
        export_draft_model(
            draft, target, tmp_path / name, dtype=torch.float32, num_speculative_tokens=3, checkpoint_step=1
        )
        assistant = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert assistant.generation_config.num_assistant_tokens == 3
        results[name] = compare(model, assistant, PROMPTS, max_new_tokens=16)
        assert results[name].divergences == []
    same, stranger = (results[name] for name in seeds)
    assert same.num_tokens == stranger.num_tokens
    assert same.num_passes < stranger.num_passes, "the export drafts: what it proposes is what is accepted"
