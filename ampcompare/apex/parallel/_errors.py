"""Errors of `apex.parallel`: ampcompare's families, with the built-in types that Apex raises."""

from __future__ import annotations

from ampcompare.base.errors import ConfigError, PreparationError

__all__ = [
    "GradientNotPlanned",
    "GradientReductionError",
    "NoForwardPass",
    "ParallelArgumentError",
    "ParallelOptionError",
    "ParallelPreparationError",
    "ProcessGroupMissing",
    "SyncBatchNormInputError",
    "UnavailableInPythonSyncBatchNorm",
]


class ParallelOptionError(ConfigError, ValueError):
    """Options of a parallel wrapper that exclude each other."""


class ParallelArgumentError(ConfigError, AssertionError):
    """An option that Apex checks by an assertion."""


class ParallelPreparationError(PreparationError, AssertionError):
    """A model that cannot be wrapped as it is."""


class ProcessGroupMissing(PreparationError, RuntimeError, ValueError):
    """No process group exists yet; torch raises a `ValueError` for it."""


class GradientReductionError(PreparationError, RuntimeError):
    """Gradients that cannot be reduced, or came where the bucket structure has no place for them."""


class GradientNotPlanned(PreparationError, KeyError):
    """A gradient for which the bucket structure has no bucket; in strict mode only."""

    __str__ = Exception.__str__


class NoForwardPass(PreparationError, AttributeError):
    """A backward pass without a forward pass of the wrapper; in strict mode only."""


class SyncBatchNormInputError(PreparationError, ValueError):
    """An input that batch norm cannot normalize."""


class UnavailableInPythonSyncBatchNorm(ConfigError, AttributeError):
    """An option that only the optimized `SyncBatchNorm` has."""
