"""Owns the certificate of every report: the real decoder on a subset, held against replay and the target's own text.

Greedy: each verify step must equal replay's, and each output the target's. Sampled: replay the very texts the decoder
wrote; given these the acceptances are independent draws of known probabilities, so the decoder's mean accepted length
must be one that such draws give, on however few prompts. Of a tree the scorer is a TreeScorer, and what counts are its
levels.
"""

import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specdist import metrics
from specdist.decoding.loop import DecodeResult, decode
from specdist.drafters.base import Drafter
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import NOTHING_DRAFTED, EvalSet, Scorer, replay_rows, setting_name, target_pass
from specdist.progress import track
from specdist.replay import draw_counts, greedy_steps
from specdist.schema import Certification, DistillRow, Divergence, Fidelity, PromptCounts
from specdist.target import forward_block

logger = logging.getLogger(__name__)

NEAR_TIE_LOGIT_GAP = 0.05
_CONFIDENCE = 0.99


def _with_completion(row: DistillRow, result: DecodeResult) -> DistillRow:
    return DistillRow(**{**vars(row), "completion_ids": result.completion_ids, "finish_reason": result.finish_reason})


@torch.inference_mode()
def first_divergence(
    model: PreTrainedModel, row: DistillRow, expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """Where two outputs part, with the target's top-2 logit gap there; None where they are equal."""
    if list(expected) == list(got):
        return None
    position = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), -1)
    if position < 0:
        position = min(len(expected), len(got))
    _, logits = forward_block(model, row.prompt_ids + list(expected[:position]), None, logits_to_keep=1)
    top = logits[0].float().topk(2).values
    gap = float(top[0] - top[1])
    return Divergence(row.prompt_id, position, gap, gap < NEAR_TIE_LOGIT_GAP)


def certify_greedy(
    model: PreTrainedModel,
    drafter: Drafter,
    scorer: Scorer,
    eval_set: EvalSet,
    num_speculative_tokens: int,
    eos_token_ids: list[int],
) -> tuple[Certification, Fidelity]:
    """Decode every text of a greedy `eval_set` speculatively; compare steps with replay and tokens with the target.

    Raises ConfigError where no text has two tokens.
    """
    gamma, mismatched, divergences = num_speculative_tokens, [], []
    replayed: list[PromptCounts] = []
    decoded: list[PromptCounts] = []
    for text in track(eval_set.texts, len(eval_set.texts), "certifying, greedy", logger):
        row = text.row
        with torch.inference_mode():
            result = decode(
                model, row.prompt_ids, eval_set.sampling, eos_token_ids, drafter=drafter, num_speculative_tokens=gamma
            )
            if result.completion_ids != row.completion_ids:
                # The text came from a batch, whose shapes may flip a tie: ask the target alone, at batch size 1.
                plain = decode(model, row.prompt_ids, eval_set.sampling, eos_token_ids)
                row = _with_completion(row, plain)
                text = target_pass(model, row, eval_set.sampling)
                if parting := first_divergence(model, row, plain.completion_ids, result.completion_ids):
                    divergences.append(parting)
            accept = scorer.accept(text, eval_set.sampling)["greedy"]
        length = len(row.completion_ids)
        if result.steps_in_text() != greedy_steps(accept, length, gamma):
            mismatched.append(row.prompt_id)
        if length > 1:
            replayed += replay_rows([row], [accept], gamma)
            decoded.append(result.counts(row.prompt_id, row.domain, gamma))
    if not replayed:
        raise ConfigError(NOTHING_DRAFTED)
    mean = metrics.pooled_length(replayed)
    certification = Certification(
        setting=setting_name(eval_set.sampling, "greedy"),
        num_speculative_tokens=gamma,
        num_prompts=len({text.row.prompt_id for text in eval_set.texts}),
        replay_mean_accepted_length=mean,
        decoder_mean_accepted_length=metrics.pooled_length(decoded),
        replay_interval=[mean, mean],
        mismatched_prompts=list(dict.fromkeys(mismatched)),
        passed=not mismatched,
        num_tree_nodes=drafter.tree.num_nodes if drafter.tree else None,
    )
    identical = len(eval_set.texts) - len(divergences)
    return certification, Fidelity(str(model.dtype).removeprefix("torch."), len(eval_set.texts), identical, divergences)


def certify_sampled(
    model: PreTrainedModel,
    drafter: Drafter,
    scorer: Scorer,
    eval_set: EvalSet,
    num_speculative_tokens: int,
    eos_token_ids: list[int],
    draft_sample_method: str | None = None,
) -> Certification:
    """Decode the prompts of a sampled `eval_set` speculatively and replay what was written.

    `draft_sample_method` None stands for probabilistic, and for greedy where the drafter has a tree. Raises ConfigError
    where the decoder wrote no text of two tokens.
    """
    gamma, method = num_speculative_tokens, draft_sample_method or ("greedy" if drafter.tree else "probabilistic")
    replayed: list[PromptCounts] = []
    decoded: list[PromptCounts] = []
    drawn = torch.zeros(metrics.BOOTSTRAP_DRAWS, 2, dtype=torch.float64)  # accepted, drafts of all texts together
    draws = torch.Generator().manual_seed(0)
    for text in track(eval_set.texts, len(eval_set.texts), "certifying, sampled", logger):
        row = text.row
        with torch.inference_mode():
            result = decode(
                model,
                row.prompt_ids,
                eval_set.sampling,
                eos_token_ids,
                drafter=drafter,
                num_speculative_tokens=gamma,
                draft_sample_method=method,
                generator=torch.Generator(device=model.device).manual_seed(row.seed),
            )
            if len(result.completion_ids) < 2:
                continue
            own = target_pass(model, _with_completion(row, result), eval_set.sampling)
            accept = scorer.accept(own, eval_set.sampling)[method]
        replayed += replay_rows([own.row], [accept], gamma)
        decoded.append(result.counts(row.prompt_id, row.domain, gamma))
        drawn += draw_counts(accept, len(own.row.completion_ids), gamma, len(drawn), draws)
    if not decoded:
        raise ConfigError(NOTHING_DRAFTED)
    real = metrics.pooled_length(decoded)
    low, high = metrics.interval((1.0 + drawn[:, 0] / drawn[:, 1]).numpy(), _CONFIDENCE)
    return Certification(
        setting=setting_name(eval_set.sampling, method),
        num_speculative_tokens=gamma,
        num_prompts=len({counts.prompt_id for counts in decoded}),
        replay_mean_accepted_length=metrics.pooled_length(replayed),
        decoder_mean_accepted_length=real,
        replay_interval=[low, high],
        mismatched_prompts=[],
        passed=low <= real <= high,
    )
