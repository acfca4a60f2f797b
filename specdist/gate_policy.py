"""Owns what the gate asks: the policy's fields, their ranges, and how it is read from YAML."""

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from specdist.errors import ConfigError


@dataclass(frozen=True)
class GatePolicy:
    """What the gate asks. Gains and margins are fractions of the mean accepted length (0.02 = 2 %)."""

    min_prompts: int = 100
    confidence: float = 0.95
    seed: int = 0
    min_mean_accepted_length: float = 1.1
    min_gain_over_untrained: float = 0.02
    domain_margin: float = 0.15
    min_domain_prompts: int = 10
    required_certifications: tuple[str, ...] = ("greedy",)
    min_speedup: float | None = None
    max_perplexity_increase: float | None = 0.02

    def __post_init__(self) -> None:
        limits = {
            "min_prompts": (2, math.inf),
            "confidence": (0.5, 0.9999),
            "seed": (0, math.inf),
            "min_mean_accepted_length": (1, math.inf),
            "min_gain_over_untrained": (0, math.inf),
            "domain_margin": (0, 1),
            "min_domain_prompts": (2, math.inf),
            "min_speedup": (0, math.inf),
            "max_perplexity_increase": (0, math.inf),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name in ("min_speedup", "max_perplexity_increase"):
                continue
            kind = (int,) if name in ("min_prompts", "seed", "min_domain_prompts") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
                raise ConfigError(f"{name} {value!r}: expected a {'whole' if kind == (int,) else 'finite'} number")
            if not low <= value <= high:
                raise ConfigError(f"{name} {value}: expected {low} to {high}")
        names = self.required_certifications
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"required_certifications {names!r}: expected a list of setting names, such as [greedy]")
        object.__setattr__(self, "required_certifications", tuple(names))


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
