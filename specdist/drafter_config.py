"""Owns the configuration of what is trained: a draft model or Medusa heads, as they are before training."""

from dataclasses import dataclass, field

from specdist.config import EvaluationArguments, TargetArguments, check_choice, check_range
from specdist.errors import ConfigError
from specdist.objective import ObjectiveArguments

LAYER_RULES = ("even", "ends", "importance")
HEAD_KINDS = (MEDUSA, HYDRA) = ("medusa", "hydra")
HEAD_PROJECTIONS = (SHARED, OWN, LOW_RANK) = ("shared", "own", "low_rank")


@dataclass(frozen=True)
class TrainedSize:
    """How large what is trained is: parameters in `total`, and of them those that learn (adapters alone, where there
    are any), which are what a checkpoint holds; `held_bytes` are the weights in memory while it trains."""

    total: int
    learned: int
    held_bytes: int

    @classmethod
    def whole(cls, parameters: int) -> "TrainedSize":
        """All of a model in fp32."""
        return cls(parameters, parameters, 4 * parameters)


@dataclass
class DraftArguments:
    """The draft model before training, and what of it is trained."""

    init: str = field(
        default="prune", metadata={"help": "prune: cut from the target; else a causal LM with the target's tokenizer."}
    )
    draft_layers: list[int] = field(
        default_factory=list, metadata={"help": "For prune: the target's layers to keep, counted from 0."}
    )
    draft_layer_rule: str | None = field(
        default=None,
        metadata={"help": "For prune, in place of draft_layers: even, ends, importance (measured on training text)."},
    )
    num_draft_layers: int = field(default=0, metadata={"help": "How many layers draft_layer_rule keeps."})
    draft_vocab_size: int = field(
        default=0, metadata={"help": "Draft only so many of the target's most frequent tokens; 0 is all."}
    )
    freeze_embeddings: bool = field(
        default=False, metadata={"help": "Leave the token embeddings and the output projection as they are."}
    )
    lora_rank: int = field(default=0, metadata={"help": "Train low-rank adapters of this rank; 0 trains the weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Adapters are scaled by lora_alpha / lora_rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters, while training."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the modules that get adapters; all-linear: all but the output projection."},
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Train the adapters on a base in 4 bits (NF4, bitsandbytes; GPU only)."}
    )

    def __post_init__(self) -> None:
        if self.draft_layer_rule is not None:
            check_choice("draft_layer_rule", self.draft_layer_rule, LAYER_RULES)
        if self.draft_layers and self.draft_layer_rule:
            raise ConfigError(
                f"draft_layers {self.draft_layers} and draft_layer_rule {self.draft_layer_rule}: both choose the "
                "layers; leave one out"
            )
        if (self.draft_layer_rule is None) != (self.num_draft_layers == 0):
            raise ConfigError(
                f"draft_layer_rule {self.draft_layer_rule} with num_draft_layers {self.num_draft_layers}: "
                "a rule needs a number of 1 or more, and a number needs a rule"
            )
        check_range("draft", "num_draft_layers", self.num_draft_layers, 0, 10_000)
        check_range("draft", "draft_vocab_size", self.draft_vocab_size, 0, 10_000_000)
        check_range("draft", "lora_rank", self.lora_rank, 0, 65_536)
        check_range("draft", "lora_alpha", self.lora_alpha, 1, 1_000_000)
        check_range("draft", "lora_dropout", self.lora_dropout, 0.0, 0.99)
        if not self.lora_target_modules or (
            "all-linear" in self.lora_target_modules and len(self.lora_target_modules) > 1
        ):
            raise ConfigError(
                f"lora_target_modules {self.lora_target_modules}: expected all-linear alone, or names of modules"
            )
        if self.load_in_4bit and not self.lora_rank:
            raise ConfigError("load_in_4bit: weights in 4 bits cannot be trained; set lora_rank as well")


@dataclass
class HeadsArguments:
    """Draft heads before training."""

    head_kind: str = field(
        default="medusa",
        metadata={"help": "medusa, or hydra: each head also sees the tokens that were drafted before it."},
    )

    medusa_num_heads: int = field(default=4, metadata={"help": "Tokens drafted at a time."})
    medusa_num_layers: int = field(default=1, metadata={"help": "Residual blocks per head."})
    head_projection: str = field(
        default="shared",
        metadata={"help": "To the vocabulary: shared (the target's, frozen), own (a copy to train), or low_rank."},
    )
    head_projection_rank: int = field(
        default=64, metadata={"help": "For low_rank: the rank of the difference to the target's, trained and merged."}
    )
    pack_tokens: int = field(
        default=0, metadata={"help": "Put documents of so many tokens together in a row; 0 pads each row."}
    )
    shard_target: bool = field(
        default=False,
        metadata={"help": "While heads learn, share the target's layers out over the processes (FSDP2)."},
    )
    head_loss_decay: float = field(
        default=0.8, metadata={"help": "Head i weighs decay^i in the loss (Cai et al. 2024, eq. 1)."}
    )
    init_heads: str | None = field(
        default=None,
        metadata={"help": "Start from the heads of this export, run or registry version, in place of untrained ones."},
    )
    target_lora_rank: int = field(
        default=0,
        metadata={"help": "Medusa-2: train low-rank adapters of this rank on the target with the heads; 0 leaves it."},
    )
    target_lora_alpha: int = field(
        default=32, metadata={"help": "The target's adapters are scaled by target_lora_alpha / target_lora_rank."}
    )
    target_learning_rate: float = field(
        default=1e-4, metadata={"help": "Of the target's adapters; the heads have learning_rate."}
    )
    target_loss_weight: float = field(
        default=5.0,
        metadata={"help": "Weight of the target's own next token beside the heads' losses (1/λ0 of Cai et al. 2024)."},
    )

    @property
    def changes_target(self) -> bool:
        """Whether the target learns as well (Medusa-2), so that the drafter is not lossless."""
        return self.target_lora_rank > 0

    def __post_init__(self) -> None:
        check_choice("head_kind", self.head_kind, HEAD_KINDS)
        check_choice("head_projection", self.head_projection, HEAD_PROJECTIONS)
        check_range("heads", "head_projection_rank", self.head_projection_rank, 1, 4_096)
        check_range("heads", "pack_tokens", self.pack_tokens, 0, 10_000_000)
        check_range("heads", "medusa_num_heads", self.medusa_num_heads, 1, 16)
        check_range("heads", "medusa_num_layers", self.medusa_num_layers, 1, 8)
        check_range("heads", "head_loss_decay", self.head_loss_decay, 0.01, 1.0)
        check_range("heads", "target_lora_rank", self.target_lora_rank, 0, 65_536)
        check_range("heads", "target_lora_alpha", self.target_lora_alpha, 1, 1_000_000)
        check_range("heads", "target_learning_rate", self.target_learning_rate, 0.0, 1.0)
        check_range("heads", "target_loss_weight", self.target_loss_weight, 0.0, 1e6)


def _check_changed_target(heads: HeadsArguments, objective: ObjectiveArguments, target: TargetArguments | None) -> None:
    """Raise ConfigError on what cannot be while the target learns."""
    asked = f"target_lora_rank {heads.target_lora_rank}"
    if heads.init_heads is None:
        raise ConfigError(
            f"{asked} without init_heads: untrained heads would pull the target away from what it says; train heads "
            "with target_lora_rank 0 first, and name that run in init_heads"
        )
    if objective.cache_target_states:
        raise ConfigError(
            f"{asked} with cache_target_states: the target's states change at every step; set "
            "cache_target_states: false, so that it runs"
        )
    if heads.shard_target or (target is not None and target.target_device_map):
        raise ConfigError(
            f"{asked} with shard_target or target_device_map: adapters are trained on a target that is whole on each "
            "device; leave one out"
        )


def check_heads(
    heads: HeadsArguments,
    evaluation: EvaluationArguments,
    objective: ObjectiveArguments,
    target: TargetArguments | None = None,
) -> None:
    """Raise ConfigError where the judged draft length exceeds the heads, and on what heads cannot learn by."""
    if heads.changes_target:
        _check_changed_target(heads, objective, target)
    if heads.shard_target and objective.cache_target_states:
        raise ConfigError(
            "shard_target with cache_target_states: the processes would wait for each other while they store states; "
            "set cache_target_states: false, so that the target runs at every step"
        )
    if objective.on_policy_share:
        raise ConfigError("on_policy_share: heads draft from the target's states and write no text; leave it out")
    if objective.needs_target and objective.target_distribution == "top":
        raise ConfigError(
            "target_distribution top: heads read the target's states, which give it in full; leave it out"
        )
    if evaluation.num_speculative_tokens > heads.medusa_num_heads:
        raise ConfigError(
            f"num_speculative_tokens = {evaluation.num_speculative_tokens}: {heads.medusa_num_heads} heads draft "
            f"at most {heads.medusa_num_heads}; lower it or raise medusa_num_heads"
        )
