"""Apex's checks of torch types that do not depend on the torch version, for scripts that import them.

Source: Apex 25.05, `apex.amp.compat`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = [
    "filter_attrs",
    "is_floating_point",
    "is_tensor_like",
    "scalar_python_val",
    "tensor_is_float_tensor",
    "tensor_is_variable",
    "variable_is_tensor",
]


def variable_is_tensor() -> bool:
    """Return True: variables are tensors since torch 0.4."""
    return True


def tensor_is_variable() -> bool:
    """Return False: the type of `torch.Tensor()` is not `Variable`."""
    return False


def tensor_is_float_tensor() -> bool:
    """Return False: since torch 0.4 the type of `torch.Tensor()` is not `torch.FloatTensor`."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Return whether `x` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: torch.Tensor) -> bool:
    """Return whether the tensor `x` has a floating dtype."""
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    """Return the number in a tensor or array of one element, or the first element of a sequence."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
