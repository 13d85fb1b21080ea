"""A step in fp32 on 16-bit weights that have no masters, with a rounding of the result that keeps small updates.

During a step the optimizer holds fp32 copies of the weights, with fp32 gradients and state. Between steps there are
only 16-bit weights, the state in its own type, and what Kahan's compensation keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.held_state import cast_entries
from ampcompare.precision.optimizer_weights import OptimizerWeights
from ampcompare.precision.rounding import StochasticRounding
from ampcompare.tensors.lists import copy_by_dtype

__all__ = ["COMPENSATION", "WideStep"]

COMPENSATION = "compensation"


class WideStep(OptimizerWeights):
    """fp32 copies of an optimizer's 16-bit weights, made for each step.

    Args:
        state_dtype: of the optimizer's state between steps; None for that of each weight.
        stochastic: rounds the weights; None for rounding to the nearest.
        kahan: keep what rounding has cut off as `compensation` in the state of the weight, and begin the next step from
            the sum of both. That is Kahan's compensated summation of the updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        state_dtype: torch.dtype | None = None,
        stochastic: StochasticRounding | None = None,
        kahan: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._state_dtype = state_dtype
        self._stochastic = stochastic
        self._kahan = kahan
        self._places: list[tuple[list[Tensor], int]] = []
        self._params: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._compensations: list[Tensor | None] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                cast_entries(optimizer, param, state_dtype or param.dtype)

    @torch.no_grad()
    def take_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            held = group["params"]
            for index, param in enumerate(held):
                if param.dtype is not torch.float32 and param.requires_grad:
                    self._widen(held, index, param)

    def _widen(self, held: list[Tensor], index: int, param: Tensor) -> None:
        copy = param.detach().float()
        entries = self._optimizer.state.pop(param, {})
        # Out of the optimizer's sight: it takes a state without its own entries for one that it has made.
        compensation = entries.pop(COMPENSATION, None)
        if compensation is not None:
            copy.add_(compensation)
        if entries:
            self._optimizer.state[copy] = entries
            cast_entries(self._optimizer, copy, torch.float32)
        if param.grad is not None:
            copy.grad, param.grad = param.grad.float(), None
        held[index] = copy.requires_grad_()
        self._places.append((held, index))
        self._params.append(param)
        self._copies.append(copy)
        self._compensations.append(compensation)

    @torch.no_grad()
    def give_weights(self) -> None:
        if self._stochastic is not None:
            self._stochastic.into(self._params, self._copies)
        else:
            copy_by_dtype(self._params, self._copies)
        if self._kahan:
            for number, (param, copy) in enumerate(zip(self._params, self._copies, strict=True)):
                if copy.grad is not None:
                    self._compensations[number] = (copy.detach() - param).to(param.dtype)
        self.drop()

    def drop(self) -> None:
        rows = zip(self._places, self._params, self._copies, self._compensations, strict=True)
        for (held, index), param, copy, compensation in rows:
            held[index] = param
            cast_entries(self._optimizer, copy, self._state_dtype or param.dtype)
            entries = self._optimizer.state.pop(copy, {})
            if compensation is not None:
                entries[COMPENSATION] = compensation
            if entries:
                self._optimizer.state[param] = entries
        for kept in (self._places, self._params, self._copies, self._compensations):
            kept.clear()
