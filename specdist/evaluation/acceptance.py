"""Owns acceptance evaluation: texts of the target and a drafter in, counters by replay out, for every draft length.

Shapes: L tokens of a completion, K drafted offsets a drafter knows, D hidden size, V vocabulary.
Index t of a completion stands for token x[t] and for the hidden state that produced it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdist import metrics, provenance
from specdist.config import MAX_SPECULATIVE_TOKENS
from specdist.drafters.causal_lm import fitted_vocabulary
from specdist.drafters.heads import HeadsOnTarget
from specdist.drafters.ngram import NgramDrafter
from specdist.drafters.vocabulary import DraftVocabulary
from specdist.errors import ConfigError
from specdist.progress import track
from specdist.replay import chain_accept, replay, tree_accept
from specdist.schema import AcceptanceResult, DistillRow, PromptCounts, SamplingSpec
from specdist.target import forward_block
from specdist.tree import MAX_RANK, DraftTree, ranks
from specdist.verify import served_logprobs

logger = logging.getLogger(__name__)

NOTHING_DRAFTED = "no evaluation text has two tokens or more, so nothing can be drafted: check the target"


@dataclass(frozen=True)
class EvalText:
    """One text of the target with what its own pass over it gave.

    `hidden` [L, D]: the final hidden state that produced x[t]; `logprobs` [L]: the served log p(x[t]), zero for greedy.
    """

    row: DistillRow
    hidden: Tensor | None = None
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class EvalSet:
    """Texts that the target wrote under one sampling. `texts_sha256`: see `AcceptanceResult`."""

    sampling: SamplingSpec
    texts: list[EvalText]
    texts_sha256: str | None = None

    def settings(self) -> list[str]:
        """Draft sample methods that make sense on these texts."""
        return ["greedy"] if self.sampling.is_greedy else ["greedy", "probabilistic"]

    def truncated(self, num_texts: int, max_new_tokens: int) -> "EvalSet":
        """Some texts, spread evenly over those that have drafts, cut as if the token limit had been lower."""
        texts = self.drafted()
        stride = max(1, len(texts) // num_texts)
        return EvalSet(
            SamplingSpec(**{**vars(self.sampling), "max_new_tokens": max_new_tokens}),
            [_truncate(text, max_new_tokens) for text in texts[::stride][:num_texts]],
        )

    def drafted(self) -> list[EvalText]:
        """The texts of two tokens or more: of one token the prefill wrote all, and nothing is ever drafted."""
        return [text for text in self.texts if len(text.row.completion_ids) > 1]


def _truncate(text: EvalText, limit: int) -> EvalText:
    row = text.row
    if len(row.completion_ids) <= limit:
        return text
    cut = DistillRow(**{**vars(row), "completion_ids": row.completion_ids[:limit], "finish_reason": "length"})
    return EvalText(
        cut,
        None if text.hidden is None else text.hidden[:limit],
        None if text.logprobs is None else text.logprobs[:limit],
    )


def setting_name(sampling: SamplingSpec, draft_sample_method: str) -> str:
    """Name of a decode setting in reports and metrics: "greedy", "t0.8" (sampled drafts), "t0.8-greedy-drafts"."""
    if sampling.is_greedy:
        return "greedy"
    suffix = "" if draft_sample_method == "probabilistic" else "-greedy-drafts"
    return f"t{sampling.temperature:g}{suffix}"


@torch.inference_mode()
def target_pass(model: PreTrainedModel, row: DistillRow, sampling: SamplingSpec) -> EvalText:
    """One teacher-forced pass of the target over its own text."""
    length = len(row.completion_ids)
    hidden, logits = forward_block(model, row.prompt_ids + row.completion_ids[:-1], None, logits_to_keep=length)
    logprobs = torch.zeros(length)
    if not sampling.is_greedy:
        chosen = torch.tensor(row.completion_ids, device=logits.device)
        logprobs = served_logprobs(logits, sampling).gather(-1, chosen[:, None])[:, 0].cpu()
    return EvalText(row, hidden[-length:].float().cpu(), logprobs)


def add_target_features(
    rows: Sequence[DistillRow], sampling: SamplingSpec, load_model: Callable[[], PreTrainedModel], cache_file: Path
) -> EvalSet:
    """One teacher-forced pass of the target over its own texts, kept in `cache_file` for later runs."""
    if not cache_file.exists():
        provenance.remove_leftovers(cache_file.parent)
        model = load_model()
        texts = [target_pass(model, row, sampling) for row in track(rows, len(rows), "target's states", logger)]
        tensors = {
            "hidden": torch.cat([text.hidden for text in texts if text.hidden is not None]),
            "logprobs": torch.cat([text.logprobs for text in texts if text.logprobs is not None]),
        }
        with provenance.atomic_path(cache_file) as temporary:
            save_file(tensors, temporary)
    tensors = load_file(cache_file)
    lengths = [len(row.completion_ids) for row in rows]
    hidden, logprobs = tensors["hidden"].split(lengths), tensors["logprobs"].split(lengths)
    return EvalSet(sampling, [EvalText(*item) for item in zip(rows, hidden, logprobs, strict=True)])


class Scorer(Protocol):
    """Turns a text into acceptance probabilities of a drafter's proposals (replay.py)."""

    max_speculative_tokens: int

    def accept(self, text: EvalText, sampling: SamplingSpec) -> dict[str, Tensor]:
        """By draft sample method: [L, γ max]; entry [s, j] is for the draft of x[s+j] in a block that starts at s."""


def _token_accept(logits: Tensor, chosen: Tensor, logprobs: Tensor | None, sampling: SamplingSpec) -> dict[str, Tensor]:
    """Acceptance of drafts from `logits` [L, V] where the text has `chosen` [L], to the target of `logprobs` [L]."""
    accepts = {"greedy": (logits.argmax(dim=-1) == chosen).float().cpu()}
    if not sampling.is_greedy:
        if logprobs is None:
            raise ConfigError("sampled drafts need the target's log-probabilities of the text: add_target_features")
        draft = served_logprobs(logits, sampling).gather(-1, chosen[:, None])[:, 0].cpu()
        accepts["probabilistic"] = (draft - logprobs).clamp(max=0.0).exp()
    return accepts


class DraftModelScorer:
    """One teacher-forced pass of the draft model gives every decision, since a draft depends on the text alone."""

    max_speculative_tokens = MAX_SPECULATIVE_TOKENS

    def __init__(self, model: PreTrainedModel, vocabulary: DraftVocabulary | int) -> None:
        """`vocabulary`: the ids that may be proposed, or the target's V for all below it."""
        self.model, self.vocabulary = model, fitted_vocabulary(model, vocabulary)

    @torch.inference_mode()
    def accept(self, text: EvalText, sampling: SamplingSpec) -> dict[str, Tensor]:
        row = text.row
        length = len(row.completion_ids)
        _, logits = forward_block(self.model, row.prompt_ids + row.completion_ids[:-1], None, logits_to_keep=length)
        logits = logits[:, : len(self.vocabulary)]  # [L, R]
        columns, known = self.vocabulary.columns(torch.tensor(row.completion_ids, device=logits.device))
        accepts = _token_accept(logits, columns, text.logprobs, sampling)
        # A token outside the draft's vocabulary is never proposed
        accepts = {m: a * known.cpu() for m, a in accepts.items()}
        return {m: chain_accept(a[None], self.max_speculative_tokens)[0] for m, a in accepts.items()}


class NgramScorer:
    """What a lookup proposes depends on the text before the block alone, and costs nothing: look up at every start."""

    max_speculative_tokens = MAX_SPECULATIVE_TOKENS

    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter = drafter

    def accept(self, text: EvalText, sampling: SamplingSpec) -> dict[str, Tensor]:
        """As `Scorer.accept`; −1 where nothing is found. Lookups are no draws, so there are greedy drafts alone."""
        prompt_ids, completion_ids = text.row.prompt_ids, text.row.completion_ids
        accept = torch.full((len(completion_ids), self.max_speculative_tokens), -1.0)
        self.drafter.reset()
        for start in range(1, len(completion_ids)):
            found = self.drafter.lookup(prompt_ids + completion_ids[:start], self.max_speculative_tokens)
            for j, pair in enumerate(zip(found, completion_ids[start:], strict=False)):
                accept[start, j] = float(pair[0] == pair[1])
        return {"greedy": accept}


class HeadsScorer:
    """The heads over the target's stored states: head j at start s reads the state that produced x[s−1].

    What it drafts counts only where all before it in the block equals the text, so the tokens that Hydra sees are the
    text's: one pass over it gives every decision of these as well.
    """

    def __init__(self, heads: HeadsOnTarget) -> None:
        self.heads = heads
        self.max_speculative_tokens = heads.num_heads

    @torch.inference_mode()
    def accept(self, text: EvalText, sampling: SamplingSpec) -> dict[str, Tensor]:
        length = len(text.row.completion_ids)
        methods = ["greedy"] if sampling.is_greedy else ["greedy", "probabilistic"]
        result = {m: torch.zeros(length, self.max_speculative_tokens) for m in methods}
        for j, (starts, chosen, logits) in enumerate(self._logits(text)):
            logprobs = None if text.logprobs is None else text.logprobs[starts + j]
            for method, accept in _token_accept(logits, chosen, logprobs, sampling).items():
                result[method][starts, j] = accept
        return result

    @torch.inference_mode()
    def ranks(self, text: EvalText) -> Tensor:
        """Where the text's tokens stand among the candidates of the heads, 0 is the best: [L, H], integers.

        Entry [s, j] is the rank of x[s+j] for head j in a block that starts at s (`tree.ranks`); MAX_RANK where no
        candidate is it, or where it lies past the text. Greedy acceptance of a chain is `ranks == 0`.
        """
        result = torch.full((len(text.row.completion_ids), self.heads.num_heads), MAX_RANK)
        for j, (starts, chosen, logits) in enumerate(self._logits(text)):
            result[starts, j] = ranks(logits, chosen).cpu()
        return result

    def _logits(self, text: EvalText) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each head j: the starts [N] of blocks whose draft j lies in the text, its tokens [N], logits [N, V]."""
        if text.hidden is None:
            raise ConfigError("draft heads need the target's hidden states of the text: add_target_features")
        tokens, hidden = torch.tensor(text.row.completion_ids, device=self.heads.device), text.hidden
        for j in range(min(self.heads.num_heads, len(tokens) - 1)):
            starts = torch.arange(1, len(tokens) - j)
            path = tokens.unfold(0, j + 1, 1)[: len(starts)]  # [N, j + 1], from x[s−1] on
            states = hidden[starts - 1].to(self.heads.device)
            yield starts, tokens[starts + j], self.heads.logits(j, states, path)


class TreeScorer:
    """A tree of the heads' candidates, instead of the chain of their best. Candidates are never sampled."""

    def __init__(self, heads: HeadsScorer, tree: DraftTree) -> None:
        self.heads, self.tree = heads, tree
        self.max_speculative_tokens = tree.depth

    def accept(self, text: EvalText, sampling: SamplingSpec) -> dict[str, Tensor]:
        return {"greedy": tree_accept(self.heads.ranks(text), self.tree)}


def replay_rows(
    rows: Sequence[DistillRow], accepts: Sequence[Tensor], num_speculative_tokens: int
) -> list[PromptCounts]:
    """Counters of each text from its acceptances [L, ≥ γ]."""
    padded = torch.nn.utils.rnn.pad_sequence(list(accepts), batch_first=True)  # [B, L max, K]
    lengths = torch.tensor([len(row.completion_ids) for row in rows])
    drafts, drafted, accepted = replay(padded, lengths, num_speculative_tokens)
    counters = zip(rows, drafts.tolist(), drafted.tolist(), accepted.tolist(), strict=True)
    return [
        PromptCounts(row.prompt_id, row.domain, steps, tokens, at_position, len(row.prompt_ids))
        for row, steps, tokens, at_position in counters
    ]


def replay_counts(
    scorer: Scorer, eval_set: EvalSet, lengths: Sequence[int], what: str = "acceptance"
) -> dict[tuple[str, int], list[PromptCounts]]:
    """Counters of every text by (draft sample method, draft length); the texts are shared out over the processes."""
    state = PartialState()
    mine = eval_set.drafted()[state.process_index :: state.num_processes]
    accepts: dict[str, list[Tensor]] = {}
    for text in track(mine, len(mine), what, logger):
        for method, accept in scorer.accept(text, eval_set.sampling).items():
            accepts.setdefault(method, []).append(accept)
    rows = [text.row for text in mine]
    counts = [
        (method, length, prompt)
        for method, values in accepts.items()
        for length in lengths
        for prompt in replay_rows(rows, values, length)
    ]
    table: dict[tuple[str, int], list[PromptCounts]] = {}
    for method, length, prompt in sorted(gather_object(counts), key=lambda item: item[2].prompt_id):
        members = table.setdefault((method, length), [])
        if members and members[-1].prompt_id == prompt.prompt_id:  # a later turn: the unit of statistics is the prompt
            members[-1] = metrics.add_counts(members[-1], prompt)
        else:
            members.append(prompt)
    return table


def evaluate(scorer: Scorer, eval_set: EvalSet, lengths: Sequence[int], what: str) -> list[AcceptanceResult]:
    """Acceptance at every draft sample method of `eval_set` and every draft length that the drafter can reach.

    Raises ConfigError where no text is long enough to be drafted.
    """
    reachable = [n for n in lengths if n <= scorer.max_speculative_tokens]
    table = replay_counts(scorer, eval_set, reachable, what)
    if not table:
        raise ConfigError(NOTHING_DRAFTED)
    return [
        metrics.acceptance_result(
            prompts,
            setting=setting_name(eval_set.sampling, method),
            temperature=eval_set.sampling.temperature,
            draft_sample_method=method,
            num_speculative_tokens=length,
            texts_sha256=eval_set.texts_sha256,
        )
        for (method, length), prompts in table.items()
    ]
