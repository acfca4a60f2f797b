"""Owns showing a dataset in a terminal: its manifest, and rows with the supervised tokens coloured."""

import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdist.dataset.manifest import verified_shards
from specdist.dataset.render import special_token_ids
from specdist.schema import DatasetManifest, DistillRow

_SUPERVISED, _SPECIAL, _PLAIN = "\033[32m", "\033[35m", "\033[0m"  # green, magenta


def manifest_lines(manifest: DatasetManifest) -> list[str]:
    """The manifest as aligned lines of name and value."""
    inputs = manifest.inputs
    fields = {
        "target": f"{inputs.target.model_id}, weights {inputs.target.weights_sha256[:12]}",
        "template": f"{inputs.target.chat_template_sha256[:12]}, {vars(inputs.chat_format)}",
        "engine": ", ".join(f"{name} ({rows} rows)" for name, rows in manifest.engines.items()) + f", {inputs.dtype}",
        "sampling": "; ".join(_sampling(vars(s)) for s in inputs.samplings) + f"; seed {inputs.seed}",
        "prompts": f"{manifest.num_prompts}, left out {manifest.rejected or 'none'}, {manifest.actions or 'unchanged'}",
        "answers": f"{manifest.num_rows} of {manifest.num_asked} asked for, finished by {manifest.finish_reasons}",
        "tokens": f"{manifest.num_prompt_tokens} of prompts, {manifest.num_supervised_tokens} supervised",
        "domains": ", ".join(f"{name} {rows}" for name, rows in sorted(manifest.domains.items())),
        "throughput": f"{manifest.tokens_per_second} tokens/s" if manifest.tokens_per_second else "not measured",
        "best tokens": f"{inputs.num_top_logprobs} at each" if inputs.num_top_logprobs else "none",
        "shards": f"{len(manifest.shards)}, rows {manifest.rows_sha256[:12]}",
    }
    width = max(map(len, fields))
    return [f"{name.ljust(width)}  {value}" for name, value in fields.items()]


def _sampling(values: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def sample_rows(directory: Path, count: int) -> Iterator[DistillRow]:
    """The first rows of each shard in turn, `count` in all. Raises ArtifactError on a damaged dataset."""
    _, shards = verified_shards(directory)
    each = -(-count // max(1, len(shards)))
    yield from islice((row for shard in shards for row in islice(shard.rows(), each)), count)


def row_lines(row: DistillRow, tokenizer: PreTrainedTokenizerBase | None, *, colour: bool) -> list[str]:
    """A row: what it is, then its text with special tokens visible; supervised tokens are green, or in ‹›.

    Without a tokenizer the ids are shown.
    """
    head = (
        f"row {row.id}  prompt {row.prompt_id}  turn {row.turn}  sample {row.sample_index}  {row.domain}  "
        f"temperature {row.sampling.temperature:g}  {len(row.prompt_ids)} + {len(row.completion_ids)} tokens  "
        f"{row.finish_reason}"
    )
    marks = (_SUPERVISED, _PLAIN) if colour else ("‹", "›")
    special = (_SPECIAL, _PLAIN) if colour else ("", "")
    prompt = _text(row.prompt_ids, tokenizer, special, back=_PLAIN if colour else "")
    answer = _text(row.completion_ids, tokenizer, special, back=marks[0] if colour else "")
    return [head, f"{prompt}{marks[0]}{answer}{marks[1]}", ""]


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase | None, special: tuple[str, str], back: str) -> str:
    """Decoded together, since a character can span tokens; cut only at special tokens, which are shown as such."""
    if tokenizer is None:
        return " ".join(map(str, ids)) + " "
    control = special_token_ids(tokenizer)
    parts: list[str] = []
    run: list[int] = []
    for token in ids:
        if token in control:
            name = tokenizer.convert_ids_to_tokens(token)
            parts += [visible(str(tokenizer.decode(run))), special[0], str(name), special[1], back]
            run = []
        else:
            run.append(token)
    return "".join([*parts, visible(str(tokenizer.decode(run)))])


def visible(text: str) -> str:
    """No control character of a text reaches the terminal, but line ends and tabs."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else f"\\x{ord(c):02x}" for c in text
    )
