"""`amp.half_function` and its kin under an arm that casts with `torch.autocast`.

Like O1's wrappers they cast the arguments only: what the function calls is cast as everywhere else. An arm without
casts of functions leaves them alone, as O0, O2 and O3 do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "cast_arguments"]

KINDS = ("half", "float", "promote")
Choose = Callable[[], "torch.dtype | None"]


def cast_arguments(function: Callable[..., Any], kind: str, half: Choose) -> Callable[..., Any]:
    """Return `function` with its floating-point arguments cast while casts are on.

    Args:
        kind: "half", "float", or "promote": to float32 if 16-bit and fp32 arguments meet.
        half: returns the 16-bit type; None while casts are off.
    """

    @functools.wraps(function)
    def casted(*args: Any, **kwargs: Any) -> Any:
        half_dtype = half()
        if half_dtype is None:
            return function(*args, **kwargs)
        dtype = half_dtype if kind == "half" else torch.float32
        if kind == "promote" and len(_dtypes([args, kwargs])) < 2:
            return function(*args, **kwargs)
        return function(*_cast(args, dtype), **_cast(kwargs, dtype))

    return casted


def _dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set().union(*map(_dtypes, items))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
