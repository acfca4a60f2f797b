"""Owns the target's final hidden states at the supervised positions of training examples, made once and kept on disk.

Shapes: S supervised positions, D hidden size. From a state the target's projection gives its whole distribution, at a
hundredth of its size. States are after the final norm (what the projection reads), in the target's dtype.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdist.dataset.examples import column_lengths
from specdist.errors import ArtifactError
from specdist.progress import track
from specdist.provenance import atomic_path, remove_leftovers
from specdist.target import backbone, check_projection

logger = logging.getLogger(__name__)

SHARD_POSITIONS = 65_536
_BATCH_TOKENS = 4_096


class TargetStates:
    """States by example, read from their shards; `offsets` [examples + 1] are positions counted over all of them."""

    def __init__(self, directory: Path, offsets: np.ndarray, first_examples: list[int]) -> None:
        self.directory, self.offsets, self.first_examples = directory, offsets, first_examples

    def of(self, example: int) -> Tensor:
        """The states of one example: [S, D]."""
        shard = int(np.searchsorted(self.first_examples, example, side="right")) - 1
        start = self.offsets[self.first_examples[shard]]
        with safe_open(_shard_path(self.directory, shard), framework="pt") as file:
            low, high = (int(self.offsets[i] - start) for i in (example, example + 1))
            return file.get_slice("states")[low:high]


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05d}.safetensors"


def _shard_starts(offsets: np.ndarray) -> list[int]:
    """The first example of each shard: a shard is closed at SHARD_POSITIONS or just after."""
    starts, limit = [], -1
    for example, offset in enumerate(offsets[:-1]):
        if offset > limit:
            starts.append(example)
            limit = int(offset) + SHARD_POSITIONS - 1
    return starts


def target_states(directory: Path, examples: Dataset, load_model: Callable[[], PreTrainedModel]) -> TargetStates:
    """The states of `examples` (input_ids, prompt_length) in `directory`, which names all that determines them.

    Shards that are there are kept, so that a killed run continues; processes share the work, and no other run may work
    in `directory`. Row i of an example's states produced its completion token i. Raises ArtifactError where the disk
    lacks room for the shards that are missing, and as `check_projection`.
    """
    state = PartialState()
    lengths = column_lengths(examples, "input_ids") - np.array(examples["prompt_length"])
    offsets = np.concatenate([[0], lengths.cumsum()])
    starts = _shard_starts(offsets)
    bounds = list(zip(starts, [*starts[1:], len(examples)], strict=True))
    missing = [i for i in range(len(bounds)) if not _shard_path(directory, i).exists()]
    if missing:
        model = load_model()
        if state.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            positions = sum(int(offsets[end] - offsets[start]) for start, end in (bounds[i] for i in missing))
            _check_room(directory, positions * model.config.get_text_config().hidden_size * model.dtype.itemsize)
        state.wait_for_everyone()
        _write(directory, examples, model, bounds, missing[state.process_index :: state.num_processes])
        state.wait_for_everyone()
    return TargetStates(directory, offsets, starts)


def _check_room(directory: Path, needed: int) -> None:
    logger.info("target's states: %.2f GB to write in %s", needed / 1e9, directory)
    if (free := shutil.disk_usage(directory).free) < needed:
        raise ArtifactError(
            f"{directory}: the target's states need {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free; "
            "free some, or set cache_target_states: false"
        )


def _write(
    directory: Path, examples: Dataset, model: PreTrainedModel, bounds: list[tuple[int, int]], shards: list[int]
) -> None:
    total = sum(bounds[i][1] - bounds[i][0] for i in shards)
    check_projection(model)
    progress = iter(track(range(total), total, "target's states", logger))
    for shard in shards:
        members = examples.select(range(*bounds[shard]))
        states: list[Tensor] = [torch.empty(0)] * len(members)
        for batch in _batches(members):
            for index, rows in zip(batch, _states(model, [members[i] for i in batch]), strict=True):
                states[index] = rows
                next(progress, None)
        with atomic_path(_shard_path(directory, shard)) as temporary:
            save_file({"states": torch.cat(states)}, temporary)


def _batches(members: Dataset) -> Iterator[list[int]]:
    """Examples of like length together, up to _BATCH_TOKENS with padding."""
    lengths = column_lengths(members, "input_ids")
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def _states(model: PreTrainedModel, rows: list[dict[str, Any]]) -> list[Tensor]:
    """The final states that produced each row's completion; under causal attention padding at the right is not seen."""
    ids = torch.zeros(len(rows), max(len(row["input_ids"]) for row in rows), dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    hidden = backbone(model)(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.cpu()  # [B, T, D]
    return [hidden[b, row["prompt_length"] - 1 : len(row["input_ids"]) - 1].clone() for b, row in enumerate(rows)]
