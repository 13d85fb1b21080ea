"""Unscaling that happens once per step, however often it is asked for."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, owned_params

__all__ = ["UnscaleOnce"]


class UnscaleOnce(Precision, abc.ABC):
    """A precision whose `unscale` changes gradients: the first call of a step does, the others return the parameters.

    `step` of a subclass ends with `_forget`.
    """

    def __init__(self) -> None:
        self._unscaled: set[int] = set()

    @abc.abstractmethod
    def _unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients of `optimizer` to their true size."""

    def _forget(self, optimizers: Sequence[Optimizer]) -> None:
        """Note that these optimizers were stepped: their next gradients are not unscaled."""
        self._unscaled.difference_update(map(id, optimizers))

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if id(optimizer) not in self._unscaled:
            self._unscale(optimizer)
            self._unscaled.add(id(optimizer))
        return owned_params(optimizer)
