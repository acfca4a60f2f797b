"""Owns the records that cross a stage boundary: frozen dataclasses of plain values (record.py).

The words are those of README.md, section "What the numbers mean".
"""

from dataclasses import dataclass, field, fields
from typing import Any

from specdist.errors import ConfigError
from specdist.record import Record
from specdist.schema_costs import StepCosts
from specdist.schema_heads import HeadsReport
from specdist.schema_quality import TargetQuality
from specdist.schema_reload import Reload


@dataclass(frozen=True)
class SamplingSpec(Record):
    """How the target samples: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; lengths in tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 10.0:
            raise ConfigError(f"temperature {self.temperature}: expected 0 (greedy) to 10")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k}: expected 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p}: expected more than 0, up to 1 (off)")
        if self.max_new_tokens < 2:
            raise ConfigError(f"max_new_tokens {self.max_new_tokens}: expected 2 or more (the first token is prefill)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p {self.min_p}: expected 0 (off) to 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def hashed_values(self) -> dict[str, Any]:
        """What is hashed of it: all fields, `min_p` only where it is on, so that hashes from before it stay."""
        return {key: value for key, value in vars(self).items() if key != "min_p" or value}


@dataclass(frozen=True)
class TargetIdentity(Record):
    """What a target is: hashes of weights, tokenizer and chat template. `model_id`, its name, has no part in `==`."""

    model_id: str = field(compare=False)
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    vocab_size: int
    eos_token_ids: list[int]

    def differences(self, other: "TargetIdentity") -> list[str]:
        """What makes another one another target, by the fields' names without "_sha256"."""
        names = [field.name for field in fields(self) if field.compare]
        return [name.removesuffix("_sha256") for name in names if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class Prompt(Record):
    """One conversation: each user turn that no assistant turn follows is answered. `id`: hash of the messages."""

    id: str
    domain: str
    language: str
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class DistillRow(Record):
    """One answer of the target to one turn, as token ids. `finish_reason`: "stop" (ends in an EOS id) or "length".

    `turn` counts the conversation's answers from 0; `sample_index` the answers under one sampling.
    Where the target's best tokens were asked for, K to a completion token: `top_ids` and `top_logprobs` hold them
    flat, [n · K], best first, as natural log-probabilities at temperature 1; `tail_mass` [n] is what the others have.
    """

    id: str
    prompt_id: str
    turn: int
    sample_index: int
    domain: str
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str
    sampling: SamplingSpec
    seed: int
    top_ids: list[int] | None = None
    top_logprobs: list[float] | None = None
    tail_mass: list[float] | None = None


@dataclass(frozen=True)
class ChatFormat(Record):
    """How conversations are given to the target, as the server will give them.

    `system_prompt` stands before conversations that bring none. `system_role` says what becomes of a system turn where
    the template has none: "fold" (put before the first user turn) or "reject". `template_arguments` and `tools` go to
    the chat template.
    """

    system_prompt: str | None = None
    system_role: str = "fold"
    template_arguments: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system_role not in ("fold", "reject"):
            raise ConfigError(f"system_role {self.system_role!r}: expected fold or reject")


@dataclass(frozen=True)
class DatasetInputs(Record):
    """All that determines what a distillation dataset holds, wherever, by how many and in what order it is written."""

    target: TargetIdentity
    prompts_sha256: str
    chat_format: ChatFormat
    samplings: list[SamplingSpec]
    max_prompt_tokens: int
    context_length: int
    engine: str  # its name without the version
    dtype: str
    seed: int
    num_top_logprobs: int


@dataclass(frozen=True)
class DatasetManifest(Record):
    """What a distillation dataset was made from and what it holds.

    `samplings` repeats a sampling as often as each prompt is answered under it. `rejected` counts prompts, and later
    turns of conversations, that were left out; `actions` what policies did to prompts that were kept.
    `engines` counts rows by engine and version; `rows_sha256` is the same however the rows are cut into `shards`,
    which maps file name to SHA-256. `seconds` and `tokens_per_second` are of the last process group that wrote.
    """

    inputs: DatasetInputs
    num_prompts: int
    num_asked: int
    num_rows: int
    num_truncated: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_supervised_tokens: int
    rejected: dict[str, int]
    actions: dict[str, int]
    finish_reasons: dict[str, int]
    domains: dict[str, int]
    engines: dict[str, int]
    tokens_per_second: float | None
    rows_sha256: str
    shards: dict[str, str]


@dataclass(frozen=True)
class PromptCounts(Record):
    """Counters of speculative decoding on one prompt (vLLM's names; the bonus token is excluded).

    Floats, because replay of a sampled text gives expectations; on greedy text they are whole numbers.
    `accepted_at_position[i]`: how many verify steps accepted their draft token i (and all before it).
    `num_prompt_tokens`: what the text begins with; of several turns of a conversation the longest.
    """

    prompt_id: str
    domain: str
    num_drafts: float
    num_draft_tokens: float
    accepted_at_position: list[float]
    num_prompt_tokens: int | None = field(default=None, compare=False)  # no counter

    @property
    def num_accepted_tokens(self) -> float:
        return sum(self.accepted_at_position)


@dataclass(frozen=True)
class AcceptanceSummary(Record):
    """Ratios of summed counters, with a 95 % bootstrap interval over prompts for the mean accepted length."""

    num_prompts: int
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    acceptance_rate: float
    mean_accepted_length: float
    mean_accepted_length_interval: list[float]
    acceptance_at_position: list[float]


@dataclass(frozen=True)
class AcceptanceResult(Record):
    """Acceptance at one decode setting and one draft length: per prompt, in total and by domain.

    `texts_sha256`: of all that determines how the texts were written, but the target; None in reports of before.
    """

    setting: str
    temperature: float
    draft_sample_method: str
    num_speculative_tokens: int
    prompts: list[PromptCounts]
    summary: AcceptanceSummary
    domains: dict[str, AcceptanceSummary]
    texts_sha256: str | None = None


@dataclass(frozen=True)
class CheckpointPoint(Record):
    """Acceptance of one training checkpoint at the primary setting and draft length (step 0 is untrained)."""

    step: int
    summary: AcceptanceSummary


@dataclass(frozen=True)
class Certification(Record):
    """Replay against the real decoder on the same prompts, at one setting and draft length, or a tree's depth.

    Greedy: `passed` iff every verify step of every prompt accepted the same count. Sampled: `passed` iff the decoder's
    mean accepted length lies in `replay_interval`, which holds 99 % of what draws of the replayed probabilities give on
    the very texts that the decoder wrote (in older reports a bootstrap interval over these prompts).
    """

    setting: str
    num_speculative_tokens: int
    num_prompts: int
    replay_mean_accepted_length: float
    decoder_mean_accepted_length: float
    replay_interval: list[float]
    mismatched_prompts: list[str]
    passed: bool
    num_tree_nodes: int | None = None


@dataclass(frozen=True)
class Divergence(Record):
    """The first token at which speculative and plain greedy output differ; `logit_gap` is the target's top-2 gap."""

    prompt_id: str
    position: int
    logit_gap: float
    near_tie: bool


@dataclass(frozen=True)
class Fidelity(Record):
    """Greedy speculative output against the target's own, token by token.

    `num_prompts` counts outputs: one for each answered turn, and anew for each way to draft (a chain, a tree).
    """

    dtype: str
    num_prompts: int
    num_identical: int
    divergences: list[Divergence]

    def __add__(self, other: "Fidelity") -> "Fidelity":
        """Of both sets of outputs together."""
        return Fidelity(
            self.dtype,
            self.num_prompts + other.num_prompts,
            self.num_identical + other.num_identical,
            self.divergences + other.divergences,
        )

    @property
    def passed(self) -> bool:
        return self.num_prompts > 0 and self.num_identical == self.num_prompts


@dataclass(frozen=True)
class SpeedPoint(Record):
    """Measured wall clock at one draft length (a tree's depth); output tokens per second.

    `speedup_interval`: 95 % bootstrap interval over prompts, each with all its repeats. In older reports each repeat
    counts as a prompt of its own, so that more of them make it narrower, and `mean_accepted_length` may hold what was
    accepted past a text's end.
    """

    num_speculative_tokens: int
    tokens_per_second: float
    speedup: float
    speedup_interval: list[float]
    mean_accepted_length: float
    predicted_speedup: float
    num_tree_nodes: int | None = None  # None for a chain


@dataclass(frozen=True)
class Speed(Record):
    """Wall clock against the target alone: same prompts and tokens, interleaved repeats; `batch_size` texts at once."""

    hardware: str
    device: str
    num_threads: int
    dtype: str
    batch_size: int
    num_prompts: int
    repeats: int
    target_tokens_per_second: float
    draft_cost_ratio: float
    points: list[SpeedPoint]


@dataclass(frozen=True)
class EvalReport(Record):
    """Everything measured on one exported drafter. `invalid_reasons` empty means the report may be judged.

    `target` is the original. Where the drafter changes it (`lossless` false), acceptance, fidelity and speed are those
    of the changed one on its own texts, and `quality` compares the two. `batch_speeds`: larger batch sizes'.
    """

    drafter_kind: str
    drafter_sha256: str
    num_parameters: int
    checkpoint_step: int
    lossless: bool
    target: TargetIdentity
    eval_prompts_sha256: str
    num_training_rows: int
    num_training_tokens: int
    primary_setting: str
    num_speculative_tokens: int
    acceptance: list[AcceptanceResult]
    untrained: AcceptanceResult
    checkpoints: list[CheckpointPoint]
    certifications: list[Certification]
    fidelity: Fidelity | None
    speed: Speed | None
    dtype: str
    invalid_reasons: list[str] = field(default_factory=list)
    heads: HeadsReport | None = None
    num_target_parameters: int | None = None
    quality: TargetQuality | None = None
    costs: StepCosts | None = None
    reload: Reload | None = None
    batch_speeds: list[Speed] = field(default_factory=list)

    @property
    def served_length(self) -> int:
        """The draft length that engines are told to serve: of heads the fastest chain's."""
        return self.heads.chain_length if self.heads else self.num_speculative_tokens

    @property
    def speeds(self) -> list[Speed]:
        """All that was timed, `speed` first."""
        return [*([self.speed] if self.speed else []), *self.batch_speeds]

    def result(self, setting: str, num_speculative_tokens: int) -> AcceptanceResult | None:
        """The acceptance at `setting` and draft length, or None where it was not measured."""
        for result in self.acceptance:
            if result.setting == setting and result.num_speculative_tokens == num_speculative_tokens:
                return result
        return None

    @property
    def primary(self) -> AcceptanceResult | None:
        """The acceptance that the gate judges."""
        return self.result(self.primary_setting, self.num_speculative_tokens)


@dataclass(frozen=True)
class GateCheck(Record):
    """One check of the gate: what was observed, what was asked, and what failing it means (hold or reject).

    `p_value`: that of no difference, by permutation; `num_prompts_needed`: about how many would decide a hold.
    """

    name: str
    passed: bool
    observed: float | None
    threshold: float | None
    champion: float | None
    on_failure: str
    reason: str
    p_value: float | None = None
    num_prompts_needed: int | None = None


@dataclass(frozen=True)
class GateDecision(Record):
    """The verdict on one report, with every check that led to it."""

    verdict: str
    reason: str
    checks: list[GateCheck]
    report_sha256: str
    champion_version: str | None
    policy: dict[str, Any]
