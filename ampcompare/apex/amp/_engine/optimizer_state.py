"""Give optimizer state the dtype of its parameters, without the detours that lose precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)

__all__ = ["cast_state", "load_state_keeping_precision", "recast_through_state_dict"]


def recast_through_state_dict(optimizer: Any) -> None:
    """Let the optimizer load its own state dict: state takes the parameters' dtypes, group dicts are replaced."""
    optimizer.load_state_dict(optimizer.state_dict())


def cast_state(optimizer: Any, *, keep_half_params_full: bool = False) -> None:
    """Cast existing per-parameter state to the dtype of its parameter, instead of reloading the state dict.

    The group dicts stay the same objects, and an optimizer that cannot load its own initial state is left alone.

    Args:
        keep_half_params_full: leave the state of half parameters alone; their masters take it over in fp32.
    """
    groups = optimizer.param_groups
    for param in list(chain.from_iterable(group["params"] for group in groups)):
        if param not in optimizer.state or (keep_half_params_full and param.dtype in HALF_TYPES):
            continue
        state = optimizer.state[param]
        for key, value in state.items() if isinstance(state, dict) else ():
            state[key] = _cast(value, key, param)


def _cast(value: Any, key: Any, param: Tensor) -> Any:
    if isinstance(value, Tensor):
        # torch.optim counts steps in fp32 tensors whatever the parameter is.
        if key == "step" or not param.is_floating_point():
            return value
        return value.to(dtype=param.dtype, device=param.device)
    if isinstance(value, dict):
        return {inner: _cast(entry, inner, param) for inner, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(entry, key, param) for entry in value)
    return value


def load_state_keeping_precision(
    optimizer: Any, load: Callable[[Mapping[str, Any]], None], state_dict: Mapping[str, Any]
) -> None:
    """Load a state dict so that fp32 state of half parameters stays fp32 until their masters exist.

    `Optimizer.load_state_dict` rounds state to the dtype of the parameter; before lazy initialization that is half, and
    Adam's second moments below 6e-8 become 0.
    """
    load(state_dict)
    if optimizer._amp_stash.lazy_init_called:
        return
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_id, param in zip(saved_ids, params, strict=True):
        saved = state_dict["state"].get(saved_id)
        if param.dtype not in HALF_TYPES or not isinstance(saved, dict):
            continue
        loaded = optimizer.state[param]
        for key, value in saved.items():
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                loaded[key] = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
