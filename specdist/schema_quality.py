"""Owns the records of what a drafter that changes the target (Medusa-2) does to its quality."""

from dataclasses import dataclass

from specdist.record import Record


@dataclass(frozen=True)
class AnswerLikelihood(Record):
    """Log-likelihood of the original target's answers to one prompt, of both targets; sums over `num_tokens` tokens."""

    prompt_id: str
    domain: str
    num_tokens: int
    original_logprob: float
    changed_logprob: float


@dataclass(frozen=True)
class TargetQuality(Record):
    """A target that was changed in training (Medusa-2) against the original, on what the original answers.

    Sampled answers at `temperature`: the perplexity of the changed target over the original's, whose logarithm
    estimates KL(original ‖ changed) per token, with its 95 % bootstrap interval over prompts. Greedy answers: how many
    of `num_greedy` the changed target gives token by token.
    """

    weights_sha256: str
    dtype: str
    temperature: float
    answers: list[AnswerLikelihood]
    perplexity_ratio: float
    perplexity_ratio_interval: list[float]
    num_greedy: int
    num_identical: int
