"""What an optimizer steps instead of 16-bit weights: the weights themselves, or fp32 masters that stay with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.half_cast import cast_state
from ampcompare.tensors.lists import copy_by_dtype

__all__ = ["Masters", "OptimizerWeights"]


class OptimizerWeights:
    """The weights of the model as they are; what stands in their place overrides these methods."""

    def __init__(self, optimizer: Optimizer) -> None:
        cast_state(optimizer)

    def collect(self) -> None:
        """Add up the gradients so far, before those of another backward pass come."""

    def take_gradients(self) -> None:
        """Give what the optimizer steps the gradients of the model."""

    def give_weights(self) -> None:
        """Give the model the weights of a step."""

    def drop(self) -> None:
        """End an update whose step is skipped."""


class Masters(OptimizerWeights):
    """fp32 master weights that replace the 16-bit parameters of an optimizer, and the copies between the two.

    Parameters of groups that are added later get masters at the next step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._num_groups = 0
        self._make_masters()

    @torch.no_grad()
    def _make_masters(self) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups[self._num_groups :]:
            for index, param in enumerate(group["params"]):
                if param.dtype is torch.float32:
                    continue
                master = param.detach().float().requires_grad_(param.requires_grad)
                self._params.append(param)
                self._masters.append(master)
                group["params"][index] = master
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        self._num_groups = len(optimizer.param_groups)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each 16-bit weight with its master."""
        return list(zip(self._params, self._masters, strict=True))

    @torch.no_grad()
    def take_gradients(self) -> None:
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        narrow: list[Tensor] = []
        wide: list[Tensor] = []
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                narrow.append(param.grad)
                wide.append(torch.empty_like(param.grad, dtype=torch.float32))
                master.grad, param.grad = wide[-1], None
        copy_by_dtype(wide, narrow)

    @torch.no_grad()
    def give_weights(self) -> None:
        copy_by_dtype(self._params, self._masters)
