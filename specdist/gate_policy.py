"""Owns what the gate asks: the policy's fields, their ranges, and how it is read from YAML."""

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from specdist.errors import ConfigError

RULES = ("acceptance_rate", "draft_cost_ratio", "size_ratio")  # of thumb
_LIMITS = {
    "min_prompts": (2, math.inf),
    "confidence": (0.5, 0.9999),
    "seed": (0, math.inf),
    "min_mean_accepted_length": (1, math.inf),
    "min_gain_over_untrained": (0, math.inf),
    "domain_margin": (0, 1),
    "min_domain_prompts": (2, math.inf),
    "min_speedup": (0, math.inf),
    "min_acceptance_rate": (0, 1),
    "max_draft_cost_ratio": (0, math.inf),
    "max_size_ratio": (0, math.inf),
    "max_perplexity_increase": (0, math.inf),
}


@dataclass(frozen=True)
class GatePolicy:
    """What the gate asks. Gains and margins are fractions of the mean accepted length (0.02 = 2 %)."""

    min_prompts: int = 100
    confidence: float = 0.95
    seed: int = 0
    min_mean_accepted_length: float = 1.1
    min_gain_over_untrained: float = 0.02
    domain_margin: float = 0.08
    min_domain_prompts: int = 10
    required_certifications: tuple[str, ...] = ("greedy",)
    min_speedup: float | None = None
    speed_batch_sizes: tuple[int, ...] = (1,)
    required_rules: tuple[str, ...] = ()
    min_acceptance_rate: float = 0.7
    max_draft_cost_ratio: float = 0.2
    max_size_ratio: float = 0.2
    max_perplexity_increase: float | None = 0.02

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in ("min_speedup", "max_perplexity_increase"):
                continue
            kind = (int,) if name in ("min_prompts", "seed", "min_domain_prompts") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
                raise ConfigError(f"{name} {value!r}: expected a {'whole' if kind == (int,) else 'finite'} number")
            if not low <= value <= high:
                raise ConfigError(f"{name} {value}: expected {low} to {high}")
        for name, item in (("required_certifications", str), ("required_rules", str), ("speed_batch_sizes", int)):
            object.__setattr__(self, name, _checked_list(name, getattr(self, name), item))
        if unknown := set(self.required_rules) - set(RULES):
            raise ConfigError(f"required_rules {sorted(unknown)}: expected some of {', '.join(RULES)}")


def _checked_list(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """A list of setting or rule names, or of numbers from 1, as a tuple. Raises ConfigError."""
    items = value if isinstance(value, (tuple, list)) else [None]
    if not all(type(item) is kind and item for item in items) or (kind is int and min(items, default=0) < 1):
        expected = "names, such as [greedy]" if kind is str else "whole numbers from 1, such as [1]"
        raise ConfigError(f"{name} {value!r}: expected a list of {expected}")
    return tuple(items)


def load_policy(path: Path) -> GatePolicy:
    """Read a policy from YAML; keys that are left out keep their defaults.

    Raises ConfigError on an unreadable or empty file, an unknown key and a value out of range.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({error}); see recipes/configs/gate.yaml") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of policy keys, got {type(data).__name__}")
    known = [f.name for f in fields(GatePolicy)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{path}: unknown key {key!r}; did you mean {near!r}? Known keys: {', '.join(known)}")
    try:
        return GatePolicy(**data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
