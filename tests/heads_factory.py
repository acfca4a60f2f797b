"""Owns what tests of exported heads share: random heads of every form that fit the tiny target, and their export."""

from pathlib import Path

import torch
from torch import Tensor

from specdist.drafter_config import HEAD_KINDS, HEAD_PROJECTIONS, LOW_RANK, MEDUSA, SHARED
from specdist.drafters.heads import DraftHeads, HeadsOnTarget, HeadsShape, TargetEnds
from specdist.export.medusa import export_medusa
from specdist.export.record import ExportRecord
from specdist.target import Target
from specdist.tree import DraftTree

HIDDEN, VOCAB = 32, 268
FORMS = [(kind, projection) for kind in HEAD_KINDS for projection in HEAD_PROJECTIONS]


def make_heads(
    num_heads: int = 3, num_layers: int = 1, kind: str = MEDUSA, projection: str = SHARED, seed: int = 1
) -> DraftHeads:
    """Heads whose every tensor is random, so that none can be left out or exchanged unseen."""
    rank = 4 if projection == LOW_RANK else 0
    heads = DraftHeads(HeadsShape(num_heads, num_layers, HIDDEN, VOCAB, kind, projection, rank))
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return heads


def export_heads(
    target: Target,
    directory: Path,
    heads: DraftHeads | None = None,
    dtype: torch.dtype = torch.float32,
    tree: DraftTree | None = None,
) -> ExportRecord:
    """Three tokens drafted, step 7."""
    projection = target.load_model(torch.float32).get_output_embeddings().weight
    settings = {"dtype": dtype, "num_speculative_tokens": 3, "checkpoint_step": 7, "draft_tree": tree}
    return export_medusa(heads or make_heads(), projection, target, directory, **settings)


def logits_of(heads: DraftHeads, target: Target) -> Tensor:
    """Logits of all heads for five random states, in fp32: [H, 5, V]."""
    hidden = random_states()
    path = torch.arange(5 * heads.num_heads).reshape(5, -1)
    on_target = HeadsOnTarget(heads, TargetEnds.of(target.load_model(torch.float32)))
    return torch.stack([on_target.logits(i, hidden, path) for i in range(heads.num_heads)])


def random_states() -> Tensor:
    """Five hidden states: [5, D]."""
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
