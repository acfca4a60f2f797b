"""Owns the configuration: one dataclass per concern, each field with one owner and its range check.

Nothing is built or parsed here (stages/arguments.py reads them from YAML and the command line).
"""

import dataclasses
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdist.errors import ConfigError
from specdist.objective import ObjectiveArguments
from specdist.prompt_policy import PromptPolicy
from specdist.redaction import redacted
from specdist.schema import ChatFormat, SamplingSpec

DTYPES = ("float32", "bfloat16", "float16")
MAX_SPECULATIVE_TOKENS = 10  # reports replay every draft length up to this
# vLLM takes a drafter whose path contains one of these for that kind of drafter
MISREAD_IN_PATHS = ("eagle-", "eagle3", "dflash", "dspark")
# What may differ between two runs into one output directory: it decides what is shown, not what is made.
VOLATILE_KEYS = frozenset(
    {
        "config",
        "target_model",  # what it is, by its hashes, is compared apart from the settings
        "dry_run",
        "report_to",
        "logging_steps",
        "disable_tqdm",
        "overwrite",
        "dataloader_num_workers",
        "run_name",
        "license",
        "mlflow_tracking_uri",
        "hub_token",
        "only_data",
        "server_urls",
        "server_model",
        "server_timeout",
        "tensor_parallel_size",
        "max_in_flight",
        "generation_batch_rows",
        "generation_batch_tokens",
        "shard_rows",
        "max_truncated_share",
    }
)


def check_range(owner: str, name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low ≤ value ≤ high."""
    if not low <= value <= high:
        raise ConfigError(f"{owner}.{name} = {value}: expected {low:g} to {high:g}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} = {value!r}: expected one of {', '.join(choices)}")


def _json_object(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError as error:
        raise ConfigError(f"{name} = {value!r}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} = {value!r}: expected a JSON object")
    return found


def _read_tools(path: str | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tools = {path!r}: cannot be read as JSON ({error})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"tools = {path!r}: expected a JSON list of objects, as the server is given them")
    return tools


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
            check_choice(name, getattr(self, name), DTYPES)


@dataclass
class PromptArguments:
    """Which conversations the target answers. A source is a file (JSONL, Parquet), a PromptSet, or a dataset's name."""

    train_prompts: list[str] = field(
        default_factory=lambda: ["data/prompts/train"],
        metadata={"help": "Sources: JSONL or Parquet files, PromptSet directories, names for datasets.load_dataset"},
    )
    train_prompt_weights: list[float] = field(
        default_factory=list, metadata={"help": "Share of each source in the mixture; empty: all of every source."}
    )
    eval_prompts: list[str] = field(
        default_factory=lambda: ["data/prompts/eval"],
        metadata={"help": "Sources held out for evaluation; none: eval_fraction of the training prompts, by hash."},
    )
    eval_fraction: float = field(default=0.05, metadata={"help": "Held out where eval_prompts is empty."})
    max_train_prompts: int | None = field(default=None, metadata={"help": "Use so many, spread over the domains."})
    max_eval_prompts: int | None = field(default=None, metadata={"help": "Use so many, spread over the domains."})
    role_order: str = field(default="repair", metadata={"help": "Turns out of order: repair (counted) or reject."})
    given_answers: str = field(
        default="regenerate",
        metadata={"help": "Assistant turns of a prompt: regenerate by the target, or keep as history."},
    )
    lone_surrogates: str = field(default="reject", metadata={"help": "Half characters: reject the row, or replace."})
    shared_prompts: str = field(
        default="reject", metadata={"help": "Training prompts that are evaluated on: an error (reject), or drop them."}
    )
    max_bad_share: float = field(default=0.01, metadata={"help": "More unusable rows than this stop the run."})
    near_duplicate_threshold: float = field(
        default=0.8, metadata={"help": "Jaccard similarity from which a prompt repeats another; 0 keeps all."}
    )

    def __post_init__(self) -> None:
        self.policy()
        if self.near_duplicate_threshold != 0:  # below a half, unrelated prompts look alike
            check_range("prompts", "near_duplicate_threshold", self.near_duplicate_threshold, 0.5, 1.0)
        check_range("prompts", "eval_fraction", self.eval_fraction, 0.001, 0.5)
        for name in ("max_train_prompts", "max_eval_prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} = {value}: expected 1 or more, or nothing for all")
        if not self.train_prompts:
            raise ConfigError("train_prompts is empty: expected at least one source")
        weights, sources = self.train_prompt_weights, self.train_prompts
        if weights and (len(weights) != len(sources) or min(weights) <= 0):
            raise ConfigError(
                f"train_prompt_weights {weights}: expected one above 0 for each of {len(sources)} sources"
            )

    def policy(self) -> PromptPolicy:
        """What is done about rows that are not as they should be. Raises ConfigError on an unknown choice."""
        return PromptPolicy(
            self.role_order, self.given_answers, self.lone_surrogates, self.shared_prompts, self.max_bad_share
        )


@dataclass
class DataArguments:
    """How the target answers: the form of its prompts, its sampling, and the engine. Lengths in tokens."""

    train_dataset: str | None = field(
        default=None, metadata={"help": "A finished dataset to train on, in place of writing one."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System turn of conversations without one, as it will be served."}
    )
    system_role: str = field(
        default="fold", metadata={"help": "System turns where the template has none: fold into the user's, or reject."}
    )
    template_arguments: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'JSON, given to the chat template, for example {"enable_thinking": false}.'}
    )
    tools: str | None = field(default=None, metadata={"help": "JSON file with a list of tools for the chat template."})
    context_length: int | None = field(
        default=None, metadata={"help": "Longest prompt with answer that is served; the target's where not given."}
    )
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are left out and counted."})
    train_temperatures: list[float] = field(
        default_factory=lambda: [0.0],
        metadata={
            "help": "One answer per prompt at each; 0 is greedy, and one that is repeated gives several answers."
        },
    )
    train_max_new_tokens: int = field(default=128, metadata={"help": "Longest answer in the training data."})
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer in the evaluation data."})
    eval_temperature: float = field(default=0.8, metadata={"help": "Temperature that will be served, beside greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of sampled answers; 1 is off."})
    top_k: int = field(default=0, metadata={"help": "Top-k of sampled answers; 0 is off."})
    min_p: float = field(
        default=0.0,
        metadata={"help": "Sampled answers leave out tokens below this share of the best one's probability; 0 is off."},
    )
    top_logprobs: int = field(
        default=0, metadata={"help": "Keep the target's best tokens and their log-probabilities at each; 0 is none."}
    )
    engine: str = field(
        default="transformers",
        metadata={"help": "What writes training answers: transformers, vllm (in this process), server (vLLM's HTTP)."},
    )
    server_urls: list[str] = field(
        default_factory=list, metadata={"help": "For server: base URLs, for example http://localhost:8000"}
    )
    server_model: str | None = field(
        default=None, metadata={"help": "For server: the name it serves the target under, where it is another."}
    )
    server_timeout: float = field(default=600.0, metadata={"help": "For server: seconds that one answer may take."})
    tensor_parallel_size: int = field(default=1, metadata={"help": "For vllm: GPUs that it spreads the target over."})
    max_in_flight: int = field(default=64, metadata={"help": "For vllm and server: answers written at a time."})
    generation_batch_rows: int = field(default=64, metadata={"help": "For transformers: answers at a time."})
    generation_batch_tokens: int = field(
        default=32_768, metadata={"help": "For transformers: tokens in the KV cache at a time, all answers together."}
    )
    max_truncated_share: float = field(
        default=0.5, metadata={"help": "Warn where more answers than this are cut off by the length limit."}
    )
    shard_rows: int = field(default=512, metadata={"help": "Answers written to disk together, or once a minute."})
    data_dir: str = field(default="runs/data", metadata={"help": "Where datasets lie; runs of one target share them."})
    generation_seed: int = field(default=0, metadata={"help": "Seeds the rows' random numbers, with their ids."})

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("transformers", "vllm", "server"))
        if (self.engine == "server") != bool(self.server_urls):
            raise ConfigError(
                f"engine {self.engine} with server_urls {self.server_urls}: server needs them, others not"
            )
        if self.engine != "transformers" and self.min_p > 0.0 and self.top_p < 1.0:
            raise ConfigError(
                f"engine {self.engine} with min_p {self.min_p} and top_p {self.top_p}: vLLM applies min_p before "
                "top_p, transformers and the measurements here after it; use one of them, or engine transformers"
            )
        check_range("data", "max_prompt_tokens", self.max_prompt_tokens, 8, 1_000_000)
        check_range("data", "server_timeout", self.server_timeout, 1.0, 1e6)
        check_range("data", "tensor_parallel_size", self.tensor_parallel_size, 1, 1_024)
        check_range("data", "max_in_flight", self.max_in_flight, 1, 65_536)
        check_range("data", "generation_batch_rows", self.generation_batch_rows, 1, 65_536)
        check_range("data", "generation_batch_tokens", self.generation_batch_tokens, 16, 1_000_000_000)
        check_range("data", "shard_rows", self.shard_rows, 1, 1_000_000)
        check_range("data", "top_logprobs", self.top_logprobs, 0, 1_000)
        check_range("data", "max_truncated_share", self.max_truncated_share, 0.0, 1.0)
        if self.eval_temperature <= 0:
            raise ConfigError(
                f"eval_temperature = {self.eval_temperature}: expected more than 0; greedy is always measured"
            )
        if not self.train_temperatures:
            raise ConfigError("train_temperatures is empty: expected at least one, for example 0.0")
        self.train_samplings()
        self.eval_samplings()
        self.template_arguments = _json_object("template_arguments", self.template_arguments)
        self.chat_format()

    def _sampling(self, temperature: float, max_new_tokens: int) -> SamplingSpec:
        return SamplingSpec(temperature, self.top_k, self.top_p, max_new_tokens, self.min_p)

    def chat_format(self) -> ChatFormat:
        """How conversations are given to the target. Raises ConfigError where `tools` is no JSON list of objects."""
        arguments = _json_object("template_arguments", self.template_arguments)
        return ChatFormat(self.system_prompt, self.system_role, arguments, _read_tools(self.tools))

    def train_samplings(self) -> list[SamplingSpec]:
        """How the target answers each training prompt."""
        return [self._sampling(temperature, self.train_max_new_tokens) for temperature in self.train_temperatures]

    def eval_samplings(self) -> list[SamplingSpec]:
        """How the target answers each evaluation prompt: greedy, and as served."""
        return [self._sampling(t, self.eval_max_new_tokens) for t in (0.0, self.eval_temperature)]


@dataclass
class EvaluationArguments:
    """What is measured, and on how much."""

    num_speculative_tokens: int = field(default=4, metadata={"help": "Draft length that the gate judges."})
    early_stopping_patience: int = field(
        default=0,
        metadata={
            "help": "Stop after so many checkpoints in a row without a better lower bound of the mean accepted length; "
            "0 is off. Each checkpoint is measured as it is saved, so save_steps is how often."
        },
    )
    certify_prompts: int = field(default=50, metadata={"help": "Answers on which the real decoder certifies replay."})
    certify_sampled_prompts: int = field(default=50, metadata={"help": "The same, for sampled decoding."})
    certify_max_new_tokens: int = field(default=32, metadata={"help": "Tokens of each, cut from the evaluation text."})
    speed_prompts: int = field(default=8, metadata={"help": "Answers that are timed, 2 or more; 0 leaves timing out."})
    speed_lengths: list[int] = field(
        default_factory=lambda: [1, 2, 3, 4], metadata={"help": "Draft lengths timed, beside that which is served."}
    )
    speed_repeats: int = field(default=2, metadata={"help": "How often each prompt is timed, in turn."})
    speed_batch_sizes: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "How many prompts are decoded at once, each of these timed."}
    )

    def __post_init__(self) -> None:
        check_range("evaluation", "num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        check_range("evaluation", "early_stopping_patience", self.early_stopping_patience, 0, 1_000_000)
        check_range("evaluation", "certify_prompts", self.certify_prompts, 1, 100_000)
        check_range("evaluation", "certify_sampled_prompts", self.certify_sampled_prompts, 1, 100_000)
        check_range("evaluation", "certify_max_new_tokens", self.certify_max_new_tokens, 2, 100_000)
        if self.speed_prompts != 0 and not 2 <= self.speed_prompts <= 100_000:
            raise ConfigError(
                f"evaluation.speed_prompts = {self.speed_prompts}: expected 0 (no timing), or 2 to 100000, since the "
                "interval is over prompts"
            )
        if not self.speed_lengths:
            raise ConfigError("evaluation.speed_lengths []: expected one length or more, such as [1, 2, 4]")
        for length in self.speed_lengths:
            check_range("evaluation", "speed_lengths", length, 1, MAX_SPECULATIVE_TOKENS)
        check_range("evaluation", "speed_repeats", self.speed_repeats, 1, 1_000)
        if not self.speed_batch_sizes:
            raise ConfigError("evaluation.speed_batch_sizes []: expected one size or more, such as [1, 8]")
        for size in self.speed_batch_sizes:
            check_range("evaluation", "speed_batch_sizes", size, 1, 1_000)


@dataclass
class ReleaseArguments:
    """Who judges, and where what passes is kept."""

    model_name: str = field(default="drafter", metadata={"help": "Name in the registry."})
    registry: str = field(default="runs/registry", metadata={"help": "Directory of the registry."})
    mlflow_tracking_uri: str | None = field(
        default=None,
        metadata={"help": "An MLflow server (or database) that is told of every version (default: the environment's)."},
    )
    gate_policy: str = field(default="recipes/configs/gate.yaml", metadata={"help": "The gate's policy."})
    license: str | None = field(
        default=None, metadata={"help": "For the model card: an identifier of Hugging Face's, for example apache-2.0."}
    )
    only_data: bool = field(default=False, metadata={"help": "Stop when the datasets are written."})
    dry_run: bool = field(default=False, metadata={"help": "Check everything, print the plan, do nothing."})


def _plain(value: Any) -> Any:
    """A training argument as YAML writes it: the trainer turns names into enumerations and some dicts into objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


@dataclass(frozen=True)
class RecipeConfig:
    """A recipe's whole configuration. `model` is the recipe's own dataclass, `training` the trainer's arguments."""

    target: TargetArguments
    prompts: PromptArguments
    data: DataArguments
    objective: ObjectiveArguments
    model: Any
    evaluation: EvaluationArguments
    release: ReleaseArguments
    training: Any
    given: dict[str, Any]

    def resolved(self) -> dict[str, Any]:
        """All of our keys and those training arguments that were given, as plain values: it loads again by --config.

        Without secrets (redaction.py).
        """
        ours = (self.target, self.prompts, self.data, self.objective, self.model, self.evaluation, self.release)
        values = {key: value for part in ours for key, value in dataclasses.asdict(part).items()}
        for key in self.given.keys() - values.keys():
            values[key] = _plain(getattr(self.training, key))
        kept = {key: value for key, value in sorted(values.items()) if key not in ("dry_run", "only_data")}
        plain: dict[str, Any] = redacted(kept)
        return plain
