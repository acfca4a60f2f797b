"""Owns every exception that specdist raises on purpose. A message says: what, got, expected, remedy.

SpecdistError
├── ConfigError         a key or a value of the configuration is wrong
├── ArtifactError       a file or directory is missing, incomplete, altered, or belongs to something else
│   └── StaleBaseline   another champion serves than the one that the gate judged against: judge again
├── TokenizerMismatch   two models that must share a tokenizer do not
└── MissingDependency   an optional package is needed; the message names the extra that installs it
"""

__all__ = ["ArtifactError", "ConfigError", "MissingDependency", "SpecdistError", "StaleBaseline", "TokenizerMismatch"]


class SpecdistError(Exception):
    """Base class: catch it to catch everything that specdist raises on purpose."""


class ConfigError(SpecdistError):
    """A configuration key or value is wrong."""


class ArtifactError(SpecdistError):
    """A file or directory is missing, incomplete, altered, or belongs to something else."""


class StaleBaseline(ArtifactError):
    """Another champion serves than the one that was judged against; nothing was changed."""


class TokenizerMismatch(SpecdistError):
    """Two models that must share one tokenizer do not."""


class MissingDependency(SpecdistError):
    """An optional package is not installed."""
