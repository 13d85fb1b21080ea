"""The first place at which two states are not the same to the last bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_difference"]


def first_difference(one: Any, other: Any, *, apart: Collection[str] = (), place: str = "") -> str:
    """Return the place and kind of the first difference of two states; "" if there is none.

    Args:
        one, other: tensors, plain values, and dicts, lists and tuples of these. A NaN equals a NaN.
        apart: keys whose values may differ, at any depth.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _of_tensors(one.detach().cpu(), other.detach().cpu(), place)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            inner = f"{place}.{key}" if place else str(key)
            if key in apart:
                continue
            if key not in one or key not in other:
                return f"{inner} is only in the {'second' if key in other else 'first'}"
            if found := first_difference(one[key], other[key], apart=apart, place=inner):
                return found
        return ""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{place} has {len(one)} entries, then {len(other)}"
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            if found := first_difference(first, second, apart=apart, place=f"{place}.{index}" if place else str(index)):
                return found
        return ""
    if one == other or _both_nan(one, other):
        return ""
    return f"{place} is {one!r}, then {other!r}"


def _of_tensors(one: Tensor, other: Tensor, place: str) -> str:
    for what in ("dtype", "shape"):
        first, second = getattr(one, what), getattr(other, what)
        if first != second:
            return f"{place} has {what} {first}, then {second}"
    bits, others = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    if torch.equal(bits, others):
        return ""
    different = (bits != others).reshape(one.numel(), -1).any(dim=1)
    index = int(different.nonzero()[0])
    first, second = one.reshape(-1)[index].item(), other.reshape(-1)[index].item()
    count = f"{int(different.sum())} of {one.numel()}"
    return f"{place} differs in {count} elements, first in {index}: {first!r}, then {second!r}"


def _both_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
