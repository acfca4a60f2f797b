"""Owns training examples: a dataset's rows as token ids, labels and prompt length, in an Arrow file read by mapping.

Nothing is tokenised again: training sees the ids that were generated, and masks come from positions, never from values.
"""

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset

from specdist.dataset.manifest import verified_shards
from specdist.errors import ArtifactError
from specdist.provenance import atomic_path

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a position without supervision, torch's cross entropy's default
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("prompt_length", pa.int32()),
    ]
)


def training_examples(directory: Path, *, max_length: int) -> Dataset:
    """Rows as `input_ids`, `labels` (-100 on the prompt) and `prompt_length`, cut at the right to `max_length`.

    Every completion token is supervised, its EOS where one was generated and nothing else. Rows of which no completion
    token remains are dropped and counted in the log. Examples are in the order of the rows' ids.
    Raises ArtifactError where no supervised token is left.
    """
    manifest, shards = verified_shards(directory)
    path = directory / f"examples-{max_length}-{manifest.rows_sha256[:12]}.arrow"
    if not path.exists():
        with atomic_path(path) as temporary, pa.ipc.new_stream(temporary, _SCHEMA) as writer:
            for shard in shards:
                table = shard.columns(["id", "prompt_ids", "completion_ids"])
                for batch in table.to_batches(max_chunksize=1024):
                    writer.write_batch(_examples(batch, max_length))
    examples = Dataset.from_file(str(path))
    if not len(examples):
        raise ArtifactError(
            f"0 supervised tokens: none of {manifest.num_rows} rows has a prompt under max_length {max_length}; "
            "raise max_length or lower max_prompt_tokens"
        )
    if dropped := manifest.num_rows - len(examples):
        logger.warning("dropped %d of %d rows: prompt of max_length %d or more", dropped, manifest.num_rows, max_length)
    order = np.argsort(examples.data.column("id").to_numpy())
    return examples.select(order).remove_columns("id")


def _examples(batch: pa.RecordBatch, max_length: int) -> pa.RecordBatch:
    rows = []
    for row in batch.to_pylist():
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        if len(prompt) < max_length and completion:
            rows.append(
                {
                    "id": row["id"],
                    "input_ids": (prompt + completion)[:max_length],
                    "labels": ([IGNORED] * len(prompt) + completion)[:max_length],
                    "prompt_length": len(prompt),
                }
            )
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
