"""Owns what a changed target costs: the original's answers under both targets, and greedy answers that differ.

Shapes: L tokens of an answer, D hidden size, V vocabulary.
Answers that were sampled are judged, at their temperature and without truncation: there the mean log-ratio of the two
targets estimates KL(original ‖ changed) per token, which only an equal distribution brings to zero. On greedy answers a
target that merely became surer of itself would look better than the original.
"""

import logging
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from specdist import metrics
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import EvalSet, EvalText, target_pass
from specdist.losses import Projection
from specdist.progress import track
from specdist.schema import DistillRow, SamplingSpec
from specdist.schema_quality import AnswerLikelihood, TargetQuality
from specdist.target import output_projection
from specdist.verify import served_logprobs

logger = logging.getLogger(__name__)


def _logprob(text: EvalText, projection: Projection, sampling: SamplingSpec) -> float:
    """Log-likelihood of an answer, from the states [L, D] that its text holds."""
    if text.hidden is None:
        raise ConfigError("the likelihood of an answer needs the target's states of it: add_target_features")
    weight = projection.weight
    hidden = text.hidden.to(weight.device, weight.dtype)
    chosen = torch.tensor(text.row.completion_ids, device=weight.device)
    logprobs: Tensor = served_logprobs(projection.of(hidden), sampling)  # [L, V]
    return float(logprobs.gather(-1, chosen[:, None]).double().sum())


@torch.inference_mode()
def answer_likelihoods(sampled: EvalSet, changed: PreTrainedModel) -> list[AnswerLikelihood]:
    """Each prompt's answers in `sampled`, which hold the original's states, under the original and under `changed`.

    `changed` must have the original's output projection. The texts are shared out over the processes; all get the same.
    Raises ConfigError where states are missing.
    """
    plain = SamplingSpec(sampled.sampling.temperature, max_new_tokens=sampled.sampling.max_new_tokens)
    projection, state = output_projection(changed, changed.config), PartialState()
    mine = sampled.texts[state.process_index :: state.num_processes]
    found = []
    for text in track(mine, len(mine), "likelihood of the original's answers", logger):
        both = (_logprob(t, projection, plain) for t in (text, target_pass(changed, text.row, plain)))
        found.append(AnswerLikelihood(text.row.prompt_id, text.row.domain, len(text.row.completion_ids), *both))
    return _by_prompt(gather_object(found))


def _by_prompt(found: Sequence[AnswerLikelihood]) -> list[AnswerLikelihood]:
    """One record for each prompt: the turns of a conversation are one unit of statistics."""
    total: dict[str, AnswerLikelihood] = {}
    for a in sorted(found, key=lambda a: (a.prompt_id, a.num_tokens, a.original_logprob)):
        sums = total.get(a.prompt_id, AnswerLikelihood(a.prompt_id, a.domain, 0, 0.0, 0.0))
        total[a.prompt_id] = AnswerLikelihood(
            a.prompt_id,
            a.domain,
            sums.num_tokens + a.num_tokens,
            sums.original_logprob + a.original_logprob,
            sums.changed_logprob + a.changed_logprob,
        )
    return list(total.values())


def num_identical(original: Sequence[DistillRow], changed: Sequence[DistillRow]) -> int:
    """How many of the original's answers are the changed target's, token by token. A row's id is that of its prompt."""
    theirs = {row.id: row.completion_ids for row in changed}
    return sum(theirs.get(row.id) == row.completion_ids for row in original)


def target_quality(
    original: Sequence[EvalSet], greedy: EvalSet, changed: PreTrainedModel, weights_sha256: str
) -> TargetQuality:
    """Compare `changed`, whose own greedy answers are `greedy`, with the target that wrote `original`.

    `original`: its greedy and its sampled answers, the latter with its states. `weights_sha256` names the changed one.
    """
    own = original[0].texts
    answers = answer_likelihoods(original[1], changed)
    return TargetQuality(
        weights_sha256=weights_sha256,
        dtype=str(changed.dtype).removeprefix("torch."),
        temperature=original[1].sampling.temperature,
        answers=answers,
        perplexity_ratio=metrics.perplexity_ratio(answers),
        perplexity_ratio_interval=metrics.interval(metrics.bootstrap_perplexity_ratios(answers)),
        num_greedy=len(own),
        num_identical=num_identical([t.row for t in own], [t.row for t in greedy.texts]),
    )
