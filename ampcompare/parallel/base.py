"""The contract of replication: three methods that the assembly and the loop call."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

__all__ = ["Parallel"]

NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class Parallel(abc.ABC):
    """How replicas of a model work together."""

    @abc.abstractmethod
    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        """Return `model` with its batch norms synchronized over the replicas, if so configured."""

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; the last step of preparation, since wrappers record dtypes."""

    def no_sync(self, models: Sequence[Any]) -> AbstractContextManager[None]:
        """Return the context in which wrapped models exchange no gradients; one process exchanges none anyway."""
        return NO_CONTEXT
