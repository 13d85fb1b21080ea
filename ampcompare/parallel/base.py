"""The contract of replication: four methods that the assembly and the loop call."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

__all__ = ["Parallel"]

NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class Parallel(abc.ABC):
    """How replicas of a model work together."""

    waits_in_forward: ClassVar[bool] = False
    """Whether a forward pass waits for other ranks, so that all of them must make equally many."""

    @abc.abstractmethod
    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        """Return `model` with its batch norms synchronized over the replicas, if so configured."""

    def shard(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Replace parameters, and the state that optimizers hold of them, by this rank's part, if so configured.

        Args:
            models, optimizers: as `Precision.prepare` returned them, before a checkpoint is loaded into them.
        """
        return

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; the last step of preparation, since wrappers record dtypes."""

    def no_sync(self, models: Sequence[Any]) -> AbstractContextManager[None]:
        """Return the context in which wrapped models exchange no gradients; one process exchanges none anyway."""
        return NO_CONTEXT
