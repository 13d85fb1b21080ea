"""Optimizer state that is held in another type than that of what the optimizer steps, between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.base import owned_params

__all__ = ["cast_entries", "hold_state_in"]


def hold_state_in(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Hold the state of `optimizer` in `dtype` between steps; a step widens it to fp32, and rounds what it leaves."""

    def cast_all(target: torch.dtype) -> None:
        for param in owned_params(optimizer):
            if param.is_floating_point():
                cast_entries(optimizer, param, target)

    optimizer.register_step_pre_hook(lambda *_: cast_all(torch.float32))
    optimizer.register_step_post_hook(lambda *_: cast_all(dtype))
    cast_all(dtype)


def cast_entries(optimizer: Optimizer, param: Tensor, dtype: torch.dtype) -> None:
    """Cast the state of a parameter, if any: the floating tensors of its shape, not counts of steps."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape and name != "step":
            state[name] = value.to(dtype)
