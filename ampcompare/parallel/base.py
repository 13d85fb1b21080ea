"""The contract of replication: three methods, called at fixed places by the assembly and the loop."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

__all__ = ["Parallel"]


class Parallel(abc.ABC):
    """How replicas of a model work together."""

    @abc.abstractmethod
    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        """Return `model` with its batch norms synchronized over the replicas, if so configured."""

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; the last step of preparation, since wrappers record dtypes."""

    @abc.abstractmethod
    def no_sync(self, models: Sequence[nn.Module], *, enabled: bool) -> AbstractContextManager[None]:
        """Return the context in which gradients stay local, for all but the last micro-batch."""
