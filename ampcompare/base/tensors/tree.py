"""Tensors inside tuples, lists, dicts and dataclasses: change each of them, read their types, find where two differ."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.products import HALF_DTYPES


def map_tensors_in_tree(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to each tensor of a nested value.

    Args:
        value: a tensor, or mappings, lists, tuples and dataclasses with tensors at any depth. It is not changed.
        change: gets a tensor, and returns what takes its place.

    Returns:
        A copy, in which mappings, named tuples and dataclasses keep their type. Values that are no tensors are the same
        objects.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors_in_tree(item, change) for key, item in value.items()}
    if isinstance(value, dict):
        outputs = copy.copy(value)  # such as those of transformers, whose items are attributes too
        for key, item in value.items():
            outputs[key] = map_tensors_in_tree(item, change)
        return outputs
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors_in_tree(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors_in_tree(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):  # else one without a default, which was not set yet
                item = map_tensors_in_tree(getattr(value, field.name), change)
                object.__setattr__(changed, field.name, item)  # it may be frozen
        return changed
    return value


def cast_floating_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Cast what is floating in a nested value.

    Args:
        value: as for `map_tensors_in_tree`.
        dtype: of each floating tensor in the result; integers and bools keep theirs.

    Returns:
        A copy; a tensor that has the type is the same object, and a cast one is in the graph of autograd.
    """
    return map_tensors_in_tree(
        value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def widen_halves(value: Any) -> Any:
    """Cast what has 16 bits in a nested value to fp32.

    Args:
        value: as for `map_tensors_in_tree`.

    Returns:
        A copy; other tensors are the same objects, and a cast one is in the graph of autograd.
    """
    return map_tensors_in_tree(
        value, lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    )


def tensors_in_value(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in_value(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in_value(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in_value(getattr(value, field.name, None))


def first_floating_type(value: Any) -> torch.dtype | None:
    """Return the type of the first floating tensor in `value`; None if it has none."""
    return next((tensor.dtype for tensor in tensors_in_value(value) if tensor.is_floating_point()), None)


def first_difference_text(
    one: Any, other: Any, *, ignored_keys: Collection[str] = (), place: str = ""
) -> str:
    """Compare two states, such as those of optimizers.

    Args:
        one, other: nested mappings and sequences of tensors and plain values. Tensors may be on different devices.
        ignored_keys: keys whose values may differ, at any depth.
        place: the path of both in a larger state, with which the answer begins.

    Returns:
        The place and the kind of the first difference; "" if there is none. A NaN equals a NaN.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _tensor_difference_text(one.detach().cpu(), other.detach().cpu(), place)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            inner = f"{place}.{key}" if place else str(key)
            if key in ignored_keys:
                continue
            if key not in one or key not in other:
                return f"{inner} is only in the {'second' if key in other else 'first'}"
            if found := first_difference_text(one[key], other[key], ignored_keys=ignored_keys, place=inner):
                return found
        return ""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{place} has {len(one)} entries, then {len(other)}"
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            if found := first_difference_text(
                first, second, ignored_keys=ignored_keys, place=f"{place}.{index}" if place else str(index)
            ):
                return found
        return ""
    if one == other or _are_both_nan(one, other):
        return ""
    return f"{place} is {one!r}, then {other!r}"


def _tensor_difference_text(one: Tensor, other: Tensor, place: str) -> str:
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


def _are_both_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
