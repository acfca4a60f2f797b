"""The registry as a Hugging Face cache: transformers, offline, opens a model by name at the revision `champion`."""

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_llama
from registry_factory import (  # noqa: F401
    MODEL,
    Killed,
    make_export,
    publish,
    registry,
    root,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.export.draft_model import export_draft_model
from specdist.registry.hub import HUB_DIRECTORY, HubCache
from specdist.registry.store import Registry
from specdist.target import open_target

# ruff: noqa: F811  (fixtures are arguments of the names that are imported)


def served_norm(registry: Registry) -> float:
    """A number by which the drafter that a reader of the cache gets is told from others."""
    where = {"revision": "champion", "cache_dir": registry.root / HUB_DIRECTORY}
    AutoTokenizer.from_pretrained(MODEL, **where)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, **where)
    return float(model.get_input_embeddings().weight.detach().norm())


def test_one_name_opens_the_champion_before_and_after_promotion_and_rollback(
    registry: Registry, tiny_target_dir: Path, tmp_path: Path
) -> None:
    target, norms = open_target(str(tiny_target_dir)), []
    settings = {"dtype": torch.float32, "num_speculative_tokens": 3, "checkpoint_step": 1}
    for number in (1, 2):
        export = tmp_path / f"export-{number}"
        draft = make_tiny_llama(target.identity.vocab_size, layers=1, seed=number)
        export_draft_model(draft, target, export, **settings)
        expected = str(number - 1) if number > 1 else None
        registry.publish(export, files={}, tags={}, expected_champion=expected)
        norms.append(served_norm(registry))
    assert norms[0] != norms[1]
    registry.rollback()
    assert served_norm(registry) == norms[0]
    moved = registry.root.rename(tmp_path / "moved")
    assert served_norm(Registry(moved, MODEL)) == norms[0]


def test_prune_leaves_no_snapshot_of_what_is_gone_and_a_challenger_is_a_revision(registry: Registry) -> None:
    for number, content in enumerate("abc"):
        publish(registry, content, str(number) if number else None)
    cache = HubCache(registry.root, MODEL)
    registry.challenge(make_export(registry.root.parent / "challenger", "z"), files={}, tags={})
    assert cache.names("champion", "3")
    assert cache.names("challenger", "4")
    assert registry.prune(0) == ["1"]
    snapshots = registry.root / HUB_DIRECTORY / f"models--{MODEL}" / "snapshots"
    assert {path.name for path in snapshots.iterdir()} == {cache.commit(number) for number in "234"}
    assert publish(registry, "z", "3") == "5"
    assert not cache.names("challenger", "4"), "promoted: nobody's challenger any more"


def test_a_writer_killed_between_link_and_cache_is_finished_by_reconcile(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(registry, "a", None)
    cache = HubCache(registry.root, MODEL)

    def killed(self: HubCache, alias: str, number: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(HubCache, "point", killed)
        with pytest.raises(Killed):
            publish(registry, "b", "1")
    assert registry.champion_path().resolve().name == "2"
    assert cache.names("champion", "1"), "the old one, which is whole"
    registry.reconcile()
    assert cache.names("champion", "2")
