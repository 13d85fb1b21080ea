"""Tensors inside tuples, lists, dicts and dataclasses: change each of them, or read their types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floating", "first_floating_type", "mapped", "tensors_in"]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to each tensor in it; named tuples and dataclasses keep their
    type, others are kept."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):  # else one without a default, which was not set yet
                object.__setattr__(changed, field.name, mapped(getattr(value, field.name), change))  # it may be frozen
        return changed
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating tensors in `dtype`."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def first_floating_type(value: Any) -> torch.dtype | None:
    """Return the type of the first floating tensor in `value`; None if it has none."""
    return next((tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()), None)
