"""Owns how a drafter's objective is configured: which losses, their weights, against which distribution of the target.

The losses themselves are in losses.py.
"""

from dataclasses import dataclass, field

from specdist.errors import ConfigError

CROSS_ENTROPY = "cross_entropy"
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance")
OVERLAPS = ("total_variation", "negative_log_acceptance")  # of these, the functions of Σ min(p, q)


@dataclass
class ObjectiveArguments:
    """What training minimises."""

    objective: list[str] = field(
        default_factory=lambda: [CROSS_ENTROPY],
        metadata={"help": f"Losses that are added up: {', '.join((CROSS_ENTROPY, *DIVERGENCES))}."},
    )
    objective_weights: list[float] = field(
        default_factory=list, metadata={"help": "Weight of each loss; empty: 1 for each."}
    )
    objective_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of both distributions; eval_temperature where not given."}
    )
    jensen_shannon_beta: float = field(
        default=0.5, metadata={"help": "β of jensen_shannon: 0 is the forward, 1 the reverse KL."}
    )
    target_distribution: str = field(
        default="full",
        metadata={"help": "full: from the target's states; top: from the stored best tokens, without the target."},
    )
    cache_target_states: bool = field(
        default=True, metadata={"help": "Keep the target's states on disk; else it runs at every step."}
    )
    on_policy_share: float = field(
        default=0.0, metadata={"help": "Share of batches that the draft answers itself, as it is then (DistillSpec)."}
    )

    def __post_init__(self) -> None:
        for name in self.objective:
            if name not in (CROSS_ENTROPY, *DIVERGENCES):
                raise ConfigError(
                    f"objective = {name!r}: expected one or more of {', '.join((CROSS_ENTROPY, *DIVERGENCES))}"
                )
        if not self.objective or len(set(self.objective)) != len(self.objective):
            raise ConfigError(f"objective = {self.objective}: expected one or more different losses")
        if self.objective_weights and (
            len(self.objective_weights) != len(self.objective) or min(self.objective_weights) <= 0
        ):
            raise ConfigError(f"objective_weights {self.objective_weights}: expected one above 0 for each objective")
        if self.objective_temperature is not None and self.objective_temperature <= 0:
            raise ConfigError(f"objective_temperature = {self.objective_temperature}: expected more than 0")
        if self.target_distribution not in ("full", "top"):
            raise ConfigError(f"target_distribution = {self.target_distribution!r}: expected full or top")
        for name in ("jensen_shannon_beta", "on_policy_share"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise ConfigError(f"{name} = {value}: expected 0 to 1")
        if self.on_policy_share and not self.needs_target:
            raise ConfigError("on_policy_share without a divergence: the draft's own text is no example to learn by")

    @property
    def needs_target(self) -> bool:
        """Whether distributions are compared, and not the target's tokens alone."""
        return any(name in DIVERGENCES for name in self.objective)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each loss by its name."""
        return dict(zip(self.objective, self.objective_weights or [1.0] * len(self.objective), strict=True))
