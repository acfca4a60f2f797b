"""Owns the configuration: one dataclass per concern, each field with one owner and its range check.

Nothing is built or parsed here (stages/arguments.py reads them from YAML and the command line).
"""

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

from specdist.errors import ConfigError
from specdist.schema import SamplingSpec

DTYPES = ("float32", "bfloat16", "float16")
# What may differ between two runs into one output directory: it decides what is shown, not what is made.
VOLATILE_KEYS = frozenset(
    {
        "config",
        "dry_run",
        "report_to",
        "logging_steps",
        "disable_tqdm",
        "overwrite",
        "dataloader_num_workers",
        "run_name",
    }
)


def _check_range(owner: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{owner}.{name} = {value}: expected {low:g} to {high:g}")


@dataclass
class TargetArguments:
    """The model that is served and verifies."""

    target_model: str = field(
        default="smollm2-135m", metadata={"help": "Hugging Face id, a directory, or smollm2-135m for the demo's."}
    )
    target_dtype: str = field(
        default="bfloat16", metadata={"help": "dtype in which it serves, writes training text and is timed."}
    )
    target_device_map: str | None = field(
        default=None,
        metadata={"help": "auto spreads a target too large for one GPU over all; then launch a single process."},
    )
    eval_dtype: str = field(
        default="float32", metadata={"help": "dtype of evaluation texts, replay and the decoder that certifies it."}
    )

    def __post_init__(self) -> None:
        for name in ("target_dtype", "eval_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: expected one of {', '.join(DTYPES)}")


@dataclass
class DataArguments:
    """Prompts, and how the target answers them. Lengths in tokens."""

    train_prompts: str = field(default="data/prompts/train", metadata={"help": "JSONL file or PromptSet directory."})
    eval_prompts: str = field(default="data/prompts/eval", metadata={"help": "The same; held out."})
    max_train_prompts: int | None = field(default=None, metadata={"help": "Use so many, spread over the domains."})
    max_eval_prompts: int | None = field(default=None, metadata={"help": "Use so many, spread over the domains."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are left out and counted."})
    train_temperatures: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "One answer per prompt at each; 0 is greedy."}
    )
    train_max_new_tokens: int = field(default=128, metadata={"help": "Longest answer in the training data."})
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer in the evaluation data."})
    eval_temperature: float = field(default=0.8, metadata={"help": "Temperature that will be served, beside greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of sampled answers; 1 is off."})
    top_k: int = field(default=0, metadata={"help": "Top-k of sampled answers; 0 is off."})
    generation_batch_size: int = field(default=32, metadata={"help": "Answers written at a time."})
    data_dir: str = field(default="runs/data", metadata={"help": "Where datasets lie; runs of one target share them."})
    generation_seed: int = field(default=0, metadata={"help": "Seeds the rows' random numbers, with their ids."})

    def __post_init__(self) -> None:
        _check_range("data", "max_prompt_tokens", self.max_prompt_tokens, 8, 1_000_000)
        _check_range("data", "generation_batch_size", self.generation_batch_size, 1, 65_536)
        if self.eval_temperature <= 0:
            raise ConfigError(
                f"eval_temperature = {self.eval_temperature}: expected more than 0; greedy is always measured"
            )
        for name in ("max_train_prompts", "max_eval_prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} = {value}: expected 1 or more, or nothing for all")
        if not self.train_temperatures:
            raise ConfigError("train_temperatures is empty: expected at least one, for example 0.0")
        self.train_samplings()
        self.eval_samplings()

    def _sampling(self, temperature: float, max_new_tokens: int) -> SamplingSpec:
        return SamplingSpec(temperature, self.top_k, self.top_p, max_new_tokens)

    def train_samplings(self) -> list[SamplingSpec]:
        """How the target answers each training prompt."""
        return [self._sampling(temperature, self.train_max_new_tokens) for temperature in self.train_temperatures]

    def eval_samplings(self) -> list[SamplingSpec]:
        """How the target answers each evaluation prompt: greedy, and as served."""
        return [self._sampling(t, self.eval_max_new_tokens) for t in (0.0, self.eval_temperature)]


@dataclass
class DraftArguments:
    """The draft model before training."""

    init: str = field(
        default="prune", metadata={"help": "prune: cut from the target; else a causal LM with the target's tokenizer."}
    )
    draft_layers: list[int] = field(
        default_factory=list, metadata={"help": "For prune: the target's layers to keep, counted from 0."}
    )
    freeze_embeddings: bool = field(
        default=False, metadata={"help": "Leave the token embeddings and the output projection as they are."}
    )


@dataclass
class HeadsArguments:
    """Medusa heads before training."""

    medusa_num_heads: int = field(default=4, metadata={"help": "Tokens drafted at a time."})
    medusa_num_layers: int = field(default=1, metadata={"help": "Residual blocks per head."})
    head_loss_decay: float = field(
        default=0.8, metadata={"help": "Head i weighs decay^i in the loss (Cai et al. 2024, eq. 1)."}
    )

    def __post_init__(self) -> None:
        _check_range("heads", "medusa_num_heads", self.medusa_num_heads, 1, 16)
        _check_range("heads", "medusa_num_layers", self.medusa_num_layers, 1, 8)
        _check_range("heads", "head_loss_decay", self.head_loss_decay, 0.01, 1.0)


@dataclass
class EvaluationArguments:
    """What is measured, and on how much."""

    num_speculative_tokens: int = field(default=4, metadata={"help": "Draft length that the gate judges."})
    certify_prompts: int = field(default=50, metadata={"help": "Prompts on which the real decoder certifies replay."})
    certify_sampled_prompts: int = field(default=50, metadata={"help": "The same, for sampled decoding."})
    certify_max_new_tokens: int = field(default=32, metadata={"help": "Tokens of each, cut from the evaluation text."})
    speed_prompts: int = field(default=8, metadata={"help": "Prompts that are timed; 0 leaves timing out."})
    speed_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4], metadata={"help": "Draft lengths timed."})
    speed_repeats: int = field(default=2, metadata={"help": "How often each prompt is timed, in turn."})

    def __post_init__(self) -> None:
        _check_range("evaluation", "num_speculative_tokens", self.num_speculative_tokens, 1, 8)
        _check_range("evaluation", "certify_prompts", self.certify_prompts, 1, 100_000)
        _check_range("evaluation", "certify_sampled_prompts", self.certify_sampled_prompts, 1, 100_000)
        _check_range("evaluation", "certify_max_new_tokens", self.certify_max_new_tokens, 2, 100_000)
        _check_range("evaluation", "speed_repeats", self.speed_repeats, 1, 1_000)


def check_heads(heads: HeadsArguments, evaluation: EvaluationArguments) -> None:
    """Raise ConfigError where the judged draft length is more than the heads can draft."""
    if evaluation.num_speculative_tokens > heads.medusa_num_heads:
        raise ConfigError(
            f"num_speculative_tokens = {evaluation.num_speculative_tokens}: {heads.medusa_num_heads} heads draft "
            f"at most {heads.medusa_num_heads}; lower it or raise medusa_num_heads"
        )


@dataclass
class ReleaseArguments:
    """Who judges, and where what passes is kept."""

    model_name: str = field(default="drafter", metadata={"help": "Name in the registry."})
    registry: str = field(default="runs/registry", metadata={"help": "Directory of the registry."})
    gate_policy: str = field(default="recipes/configs/gate.yaml", metadata={"help": "The gate's policy."})
    dry_run: bool = field(default=False, metadata={"help": "Check everything, print the plan, do nothing."})


@dataclass(frozen=True)
class RecipeConfig:
    """A recipe's whole configuration. `model` is the recipe's own dataclass, `training` the trainer's arguments."""

    target: TargetArguments
    data: DataArguments
    model: Any
    evaluation: EvaluationArguments
    release: ReleaseArguments
    training: Any
    given: dict[str, Any]

    def resolved(self) -> dict[str, Any]:
        """All of our keys and those training arguments that were given, as plain values: it loads again by --config."""
        ours = (self.target, self.data, self.model, self.evaluation, self.release)
        values = {key: value for part in ours for key, value in dataclasses.asdict(part).items()}
        for key in self.given.keys() - values.keys():
            value = getattr(self.training, key)
            values[key] = value.value if isinstance(value, enum.Enum) else value
        return {key: value for key, value in sorted(values.items()) if key != "dry_run"}
