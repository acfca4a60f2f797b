"""Owns the records of what decoding costs on some hardware: target passes, drafting, the first token, memory.

They are part of an evaluation report (schema.py) and apart from it because of their size.
"""

from dataclasses import dataclass

from specdist.record import Record
from specdist.schema_heads import VerifyCost


@dataclass(frozen=True)
class DraftCost(Record):
    """Drafting one block at batch size 1, in steps of the target: a chain of so many tokens, or a tree ("tree")."""

    kind: str  # "chain" or "tree"
    num_tokens: int
    ratio: float


@dataclass(frozen=True)
class FirstToken(Record):
    """Median seconds at a prompt of `prompt_tokens` tokens, with and without a drafter.

    `target_seconds` and `drafting_seconds`: until the first token, which no drafter has a hand in;
    `first_block_seconds`: what drafting the first block takes then, since the draft reads the prompt as well.
    """

    prompt_tokens: int
    target_seconds: float
    drafting_seconds: float
    first_block_seconds: float


@dataclass(frozen=True)
class Memory(Record):
    """Bytes that target and drafter hold: weights (what they share counts as the target's), cache per token of a text.

    `peak`, `drafting_peak`: largest while a text is decoded without and with the drafter, both loaded: of tensors on
    CUDA, else resident memory of the process; None where the system does not say.
    """

    target_weights: int
    drafter_weights: int
    target_cache_per_token: int
    drafter_cache_per_token: int
    peak: int | None
    drafting_peak: int | None


@dataclass(frozen=True)
class StepCosts(Record):
    """What decoding costs after a context of `context_tokens`; `verify` has a curve for each batch size."""

    hardware: str
    num_threads: int
    dtype: str
    context_tokens: int
    verify: list[VerifyCost]
    draft: list[DraftCost]
    first_token: FirstToken
    memory: Memory

    def draft_ratio(self, kind: str, num_tokens: int) -> float | None:
        """The cost of drafting such a block; None where it was not measured."""
        return next((c.ratio for c in self.draft if (c.kind, c.num_tokens) == (kind, num_tokens)), None)
