"""Owns which token ids a draft model shares with its target and may propose: same tokenizer, padding, reduced set.

Shapes: V vocabulary of the target, S ids that its tokenizer knows (the rows above are padding), R ids that the draft
may propose, D hidden size.

A draft model on disk has all V rows of the output projection; a reduced vocabulary lies beside it as a list of ids. It
is no safetensors file, since engines load every one of those in a directory as weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdist import provenance
from specdist.errors import ArtifactError, ConfigError, TokenizerMismatch
from specdist.record import Record
from specdist.target import Target

logger = logging.getLogger(__name__)

VOCABULARY_FILE = "draft_vocabulary.json"


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    ids: dict[str, int] = dict(tokenizer.get_vocab())
    for token in tokenizer.all_special_tokens:
        ids[token] = tokenizer.convert_tokens_to_ids(token)  # type: ignore[assignment] # an int for a single token
    return ids


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_name: str) -> None:
    """Raise TokenizerMismatch, naming the first differing token, unless both map every token to the same id.

    Special tokens are compared like all others. Special tokens that the draft has beyond the target's last id (a PAD
    that fine-tuning added) are no difference: the target never writes them, and their rows are cut off. Nor is another
    choice of the EOS among the same ids, as of a base model for its instruct model: the draft learns the target's.
    """
    ours, theirs = _token_ids(target), _token_ids(draft)
    size, special = 1 + max(ours.values()), set(draft.all_special_tokens)
    extra = {token for token in theirs.keys() - ours.keys() if theirs[token] >= size and token in special}
    different = [t for t in (ours.keys() | theirs.keys()) - extra if ours.get(t) != theirs.get(t)]
    if not different:
        if extra:
            logger.info("draft model %s: its own special tokens %s are left out", draft_name, sorted(extra))
        if target.eos_token != draft.eos_token:
            eos = (draft.eos_token, target.eos_token)
            logger.info("draft model %s: its texts end in %s, the target's in %s, which it learns", draft_name, *eos)
        return
    token = min(different, key=lambda t: (min(ours.get(t, 1 << 60), theirs.get(t, 1 << 60)), t))
    raise TokenizerMismatch(
        f"draft model {draft_name}: its tokenizer differs from the target's, first at token {token!r}: "
        f"target id {ours.get(token)}, draft id {theirs.get(token)} ({len(ours)} and {len(theirs)} tokens in all). "
        "Acceptance compares token ids, so both must share one tokenizer: take a draft model of the target's family, "
        "or --init prune"
    )


def shared_vocabulary_size(target: Target) -> int:
    """S: one more than the highest id of the target's tokenizer. Rows of either model from S on are padding."""
    return 1 + max(_token_ids(target.tokenizer).values())


@torch.no_grad()
def mute_others(model: PreTrainedModel, ids: Tensor) -> None:
    """Make all rows of the output projection that are not in `ids` the mean of those that are.

    Their logits are then the mean of the others', so no engine that drafts greedily over all rows can propose one,
    and under sampling each has a probability of at most 1/R (Jensen's inequality). Embeddings that are tied to the
    projection are untied where `ids` leaves out tokens that a text can hold, since those are read as well.
    """
    projection = cast(nn.Linear, model.get_output_embeddings())
    silent = torch.ones(projection.out_features, dtype=torch.bool, device=model.device)
    silent[ids] = False
    if projection.weight is model.get_input_embeddings().weight and bool(silent[: int(ids[-1])].any()):
        projection.register_parameter("weight", nn.Parameter(projection.weight.detach().clone()))
        model.config.tie_word_embeddings = False
    for rows in (projection.weight, getattr(projection, "bias", None)):  # [V, D], [V]
        if rows is not None:
            rows[silent] = rows[~silent].mean(dim=0)


def mute_padding(model: PreTrainedModel, shared: int) -> None:
    """Let no row from `shared` on be proposed: `mute_others`."""
    mute_others(model, torch.arange(shared))


def select_vocabulary(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent ids, sorted: [R]. `counts` [S] says how often each occurs; `always` are in first.

    Of equally frequent ids the lower is taken, which also fills up where fewer were seen. Raises ConfigError where
    `size` is more than S or has no room for `always`, and where one of those is not below S.
    """
    forced = sorted(set(always))
    if not len(forced) <= size <= len(counts):
        raise ConfigError(
            f"draft_vocab_size = {size}: expected {len(forced)} (the ids that are always in) to {len(counts)} "
            "(the tokenizer's ids), or 0 for all"
        )
    if forced and not 0 <= forced[0] <= forced[-1] < len(counts):
        raise ConfigError(f"draft vocabulary: ids {forced} must be in, but the tokenizer has only {len(counts)} ids")
    ranks = counts.to(torch.int64).clone()
    ranks[forced] = int(ranks.max()) + 1
    return torch.argsort(ranks, descending=True, stable=True)[:size].sort().values


@dataclass(frozen=True)
class VocabularyRecord(Record):
    """The file of a reduced draft vocabulary: the target's V and the sorted ids that the draft may propose."""

    vocab_size: int
    token_ids: list[int]


def write_vocabulary(directory: Path, ids: Tensor, vocab_size: int) -> None:
    """Write the sorted `ids` [R] of a reduced vocabulary beside a draft model in `directory`."""
    provenance.write_json(directory / VOCABULARY_FILE, VocabularyRecord(vocab_size, ids.tolist()).to_json())


def read_vocabulary(directory: Path) -> Tensor | None:
    """The sorted ids [R] of a reduced vocabulary in `directory`, int64; None where the draft has the full one.

    Raises ArtifactError where the ids are not sorted, not different, or not below the target's vocabulary size.
    """
    path = directory / VOCABULARY_FILE
    if not path.exists():
        return None
    record = VocabularyRecord.from_json(provenance.read_json(path), str(path))
    ids = record.token_ids
    if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < record.vocab_size:
        raise ArtifactError(
            f"{path}: expected different ids below {record.vocab_size} in rising order; delete the run's init "
            "directory and start anew"
        )
    return torch.tensor(ids)


class DraftVocabulary:
    """Which of the target's V ids a draft model may propose: column j of its logits stands for `ids[j]`."""

    def __init__(self, ids: Tensor, size: int) -> None:
        """`ids` [R]: sorted, below `size`, which is V."""
        self.ids, self.size = ids, size

    @classmethod
    def first(cls, shared: int, size: int) -> "DraftVocabulary":
        """Every id below `shared`, of `size` ids of the target."""
        return cls(torch.arange(shared), size)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_prefix(self) -> bool:
        """Whether the ids are 0 … R − 1, so that a model's first R columns are theirs as they stand."""
        return int(self.ids[-1]) == len(self.ids) - 1

    def to(self, device: torch.device) -> "DraftVocabulary":
        """The same on `device`."""
        return DraftVocabulary(self.ids.to(device), self.size)

    def columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The columns [...] of `token_ids` [...], and whether each is in the vocabulary (else its column is one of
        another id, for indexing alone)."""
        columns = torch.searchsorted(self.ids, token_ids).clamp(max=len(self.ids) - 1)
        return columns, self.ids[columns] == token_ids

    def spread(self, probs: Tensor) -> Tensor:
        """`probs` [..., R] over the target's vocabulary: [..., V], 0 for every other id."""
        return probs.new_zeros(*probs.shape[:-1], self.size).index_copy_(-1, self.ids, probs)


def restrict_projection(model: PreTrainedModel, vocabulary: DraftVocabulary) -> PreTrainedModel:
    """Replace the output projection of `model` by its rows of `vocabulary`, in place, for drafting: [V, D] → [R, D].

    Embeddings that are tied to it keep all rows. A prefix of the ids needs no copy: callers read the first R columns.
    """
    if vocabulary.is_prefix:
        return model
    full = model.get_output_embeddings()
    reduced = nn.Linear(full.in_features, len(vocabulary), bias=full.bias is not None, device="meta")
    for name, rows in full.named_parameters():
        setattr(reduced, name, nn.Parameter(rows.detach()[vocabulary.ids.to(rows.device)], requires_grad=False))
    model.set_output_embeddings(reduced)
    return model
