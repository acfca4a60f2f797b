"""Owns measuring whether a draft fits its target before it is trained: what a drafted token and a verified block cost.

Costs come from shapes, dtype and hardware, not from what the weights say, so an untrained draft has those of a trained
one. Batch size 1.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedModel

from specdist.drafter_config import DraftArguments
from specdist.drafters.base import DecodeContext, Drafter
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.initial import make_draft_model
from specdist.drafters.vocabulary import DraftVocabulary, restrict_projection, shared_vocabulary_size
from specdist.evaluation.speed import hardware_name
from specdist.evaluation.verify_cost import CONTEXT_TOKENS, CachedContext, interleaved, passages
from specdist.record import Record
from specdist.target import Target

logger = logging.getLogger(__name__)

MAX_LENGTH = 10
_PASSAGE = (
    "A small model writes a few words ahead, and a large one reads them all at once. Where both agree the words stay, "
    "where they differ the large model puts its own word, and the small one goes on from there. Nothing in the text "
    "changes; only the time that it takes does. How much is won depends on two numbers: how often they agree, and what "
    "the small model costs beside the large one. "
)


@dataclass(frozen=True)
class Fit(Record):
    """A draft beside its target. Costs are in steps of the target, a step being one token after a short context.

    `verify_cost_ratios[i]`: one target pass over i + 2 tokens, which verifies i + 1 drafted ones.
    `draft_vocab_size`: rows of the draft before it is brought to the target's; `num_tokens`: of the shared tokenizer.
    """

    target_model: str
    draft_model: str
    dtype: str
    hardware: str
    num_threads: int
    target_parameters: int
    draft_parameters: int
    target_vocab_size: int
    draft_vocab_size: int
    num_tokens: int
    target_step_seconds: float
    draft_cost_ratio: float
    verify_cost_ratios: list[float]


def _step_seconds(model: PreTrainedModel, drafter: Drafter, token_ids: Sequence[int]) -> dict[int, float]:
    """Median seconds of drafting one token (key 0) and of a target pass over n tokens (key n), measured in turn."""
    context = CachedContext(model, passages(token_ids, 1, MAX_LENGTH + 1))
    state = DecodeContext(context.context[0].tolist(), None, torch.Generator())
    drafter.reset()

    def run(tokens: int) -> None:
        if tokens == 0:
            drafter.commit(CONTEXT_TOKENS, context.hidden[0])  # takes the newest token back out of the cache
            drafter.propose(state, 1).token_ids.tolist()  # waits for the device
        else:
            context.verify(tokens)

    return interleaved(run, range(MAX_LENGTH + 2))


def _passage(target: Target) -> list[int]:
    """Token ids of plain English."""
    ids: list[int] = target.tokenizer.encode(_PASSAGE, add_special_tokens=False)
    return ids


def _untrained_draft(
    arguments: DraftArguments, target: Target, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, DraftVocabulary]:
    """What would be trained, and as many ids as it may propose; which ids and layers does not change its time."""
    draft, _ = make_draft_model(arguments, target, [_passage(target)])
    draft.to(device=device, dtype=dtype).eval()  # type: ignore[call-arg] # mypy cannot see torch's overload
    shared, size = shared_vocabulary_size(target), target.identity.vocab_size
    vocabulary = DraftVocabulary.first(shared, size)
    if arguments.draft_vocab_size:
        vocabulary = DraftVocabulary(torch.arange(shared - arguments.draft_vocab_size, shared), size)
    vocabulary = vocabulary.to(device)
    return restrict_projection(draft, vocabulary), vocabulary


def _describe(arguments: DraftArguments, target: Target, draft: PreTrainedModel) -> tuple[str, int]:
    """The draft in words, and the rows of its vocabulary before they are made the target's."""
    layers, of = (m.get_text_config().num_hidden_layers for m in (draft.config, target.config))
    if arguments.init == "prune":
        return f"{layers} of its {of} layers", target.identity.vocab_size
    rows = AutoConfig.from_pretrained(arguments.init).get_text_config().vocab_size
    return f"{arguments.init}, {layers} layers", rows


def measure_fit(
    target: Target,
    arguments: DraftArguments,
    dtype: torch.dtype,
    device: torch.device,
    device_map: str | None = None,
) -> Fit:
    """Make the untrained draft, load both in `dtype` on `device` and time single steps, interleaved.

    Raises TokenizerMismatch where the draft cannot share the target's token ids, ArtifactError or ConfigError where it
    cannot be made (drafters/initial.py).
    """
    draft, vocabulary = _untrained_draft(arguments, target, dtype, device)
    model = target.load_model(dtype, device, device_map)
    name, rows = _describe(arguments, target, draft)
    logger.info("timing a draft of %s beside %s", name, target.identity.model_id)
    seconds = _step_seconds(model, DraftModelDrafter(draft, vocabulary), _passage(target))
    return Fit(
        target_model=target.identity.model_id,
        draft_model=name,
        dtype=str(dtype).removeprefix("torch."),
        hardware=hardware_name(model.device),
        num_threads=torch.get_num_threads(),
        target_parameters=model.num_parameters(),
        draft_parameters=draft.num_parameters(),
        target_vocab_size=target.identity.vocab_size,
        draft_vocab_size=rows,
        num_tokens=len(target.tokenizer),
        target_step_seconds=seconds[1],
        draft_cost_ratio=seconds[0] / seconds[1],
        verify_cost_ratios=[seconds[n] / seconds[1] for n in range(2, MAX_LENGTH + 2)],
    )
