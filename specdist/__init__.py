"""specdist: train draft models and Medusa heads, measure what the target accepts, release only a measured gain."""

__version__ = "0.1.0"
