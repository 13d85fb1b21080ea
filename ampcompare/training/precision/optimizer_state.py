"""The types in which optimizers hold their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.training.precision.base import (
    owned_params,
)


def cast_optimizer_state(optimizer: Optimizer) -> None:
    """Cast the state of an optimizer, if any, to the current dtypes of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def hold_state_in_type(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Hold the state of an optimizer in a type between its steps; a step widens it to fp32, and rounds what it leaves.

    Args:
        optimizer: gets hooks around its step.
        dtype: of the state of each floating parameter.
    """

    def cast_all_state(target: torch.dtype) -> None:
        for param in owned_params(optimizer):
            if param.is_floating_point():
                cast_state_of_parameter(optimizer, param, target)

    optimizer.register_step_pre_hook(lambda *_: cast_all_state(torch.float32))
    optimizer.register_step_post_hook(lambda *_: cast_all_state(dtype))
    cast_all_state(dtype)


def cast_state_of_parameter(optimizer: Optimizer, param: Tensor, dtype: torch.dtype) -> None:
    """Cast the state of a parameter, if any: the floating tensors of its shape, not counts of steps."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    for name, value in state.items():
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and name != "step"
        ):
            state[name] = value.to(dtype)
