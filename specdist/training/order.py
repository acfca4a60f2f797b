"""Owns the order of rows in each epoch: it depends on the seed and the epoch alone, so a resumed run sees the same."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import Trainer


def seeded_by_epoch(sampler: Sampler[int] | None, trainer: Trainer) -> Sampler[int] | None:
    """`sampler` in an order that depends on the trainer's seed and epoch alone; None (of a stream) stays None."""
    return None if sampler is None else _EpochSeeded(sampler, trainer)


class _EpochSeeded(Sampler[int]):
    """Draws another sampler's order from a seed of its own in each epoch.

    The trainer's group_by_length draws from the global random numbers, which a run that is resumed within a later
    epoch has no longer: it would go on in another order.
    """

    def __init__(self, sampler: Sampler[int], trainer: Trainer) -> None:
        self.sampler, self.trainer = sampler, trainer

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type] # the trainer's samplers all have a length

    def __iter__(self) -> Iterator[int]:
        arguments, epoch = self.trainer.args, int(self.trainer.state.epoch or 0)
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed + epoch)
            return iter(list(self.sampler))
