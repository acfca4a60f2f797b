"""Owns training examples: a dataset's rows as token ids, labels and prompt length, in an Arrow file read by mapping.

Nothing is tokenised again: training sees the ids that were generated, and masks come from positions, never from values.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from specdist.dataset.manifest import verified_shards
from specdist.errors import ArtifactError
from specdist.provenance import atomic_path

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a position without supervision, torch's cross entropy's default
_COLUMNS = [
    ("id", pa.string()),
    ("input_ids", pa.list_(pa.int32())),
    ("labels", pa.list_(pa.int32())),
    ("prompt_length", pa.int32()),
]
_TOP_COLUMNS = [
    ("top_ids", pa.list_(pa.int32())),
    ("top_logprobs", pa.list_(pa.float16())),
    ("tail_mass", pa.list_(pa.float32())),
]


def training_examples(directory: Path, *, max_length: int, top: bool = False) -> Dataset:
    """Rows as `id`, `input_ids`, `labels` (-100 on the prompt) and `prompt_length`, cut at the right to `max_length`.

    With `top`, the target's K best tokens at each completion token go along as they are stored: `top_ids` and
    `top_logprobs` flat [n · K], `tail_mass` [n].

    Every completion token is supervised, its EOS where one was generated and nothing else. Rows of which no completion
    token remains are dropped and counted in the log. Examples are in the order of the rows' ids.
    Raises ArtifactError where no supervised token is left, or where the dataset has no best tokens.
    """
    manifest, shards = verified_shards(directory)
    num_best = manifest.inputs.num_top_logprobs if top else 0
    if top and not num_best:
        raise ArtifactError(
            f"{directory}: holds no best tokens of the target; make it with top_logprobs: 64, or set "
            "target_distribution: full"
        )
    path = directory / f"examples-{max_length}{'-top' if top else ''}-{manifest.rows_sha256[:12]}.arrow"
    if not path.exists():
        schema = pa.schema(_COLUMNS + (_TOP_COLUMNS if top else []))
        names = ["id", "prompt_ids", "completion_ids", *(name for name, _ in _TOP_COLUMNS if top)]
        with atomic_path(path) as temporary, pa.ipc.new_stream(temporary, schema) as writer:
            for shard in shards:
                for batch in shard.columns(names).to_batches(max_chunksize=1024):
                    rows = _examples(batch, max_length, num_best)
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    examples = Dataset.from_file(str(path))
    if not len(examples):
        raise ArtifactError(
            f"0 supervised tokens: none of {manifest.num_rows} rows has a prompt under max_length {max_length}; "
            "raise max_length or lower max_prompt_tokens"
        )
    if dropped := manifest.num_rows - len(examples):
        logger.warning("dropped %d of %d rows: prompt of max_length %d or more", dropped, manifest.num_rows, max_length)
    order = np.argsort(examples.data.column("id").to_numpy())
    return examples.select(order)


def column_lengths(examples: Dataset, name: str) -> np.ndarray:
    """Length of the list in column `name` of every example: [examples]. Read in batches, not as Python's lists."""
    batches = examples.select_columns(name).with_format("arrow").iter(10_000)
    return np.concatenate([pc.list_value_length(batch.column(name)).to_numpy() for batch in batches])


def _examples(batch: pa.RecordBatch, max_length: int, num_best: int) -> list[dict[str, Any]]:
    rows = []
    for row in batch.to_pylist():
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        if len(prompt) < max_length and completion:
            example = {
                "id": row["id"],
                "input_ids": (prompt + completion)[:max_length],
                "labels": ([IGNORED] * len(prompt) + completion)[:max_length],
                "prompt_length": len(prompt),
            }
            if num_best:
                kept = min(len(completion), max_length - len(prompt))
                example |= {name: row[name][: kept * num_best] for name in ("top_ids", "top_logprobs")}
                example["tail_mass"] = row["tail_mass"][:kept]
            rows.append(example)
    return rows
