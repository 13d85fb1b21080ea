"""How a value of a checkpoint differs from that of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, equal

from ampcompare.checkpoint.store.layout import TENSOR_CLASS, TENSOR_SHARDS
from ampcompare.training.state.flattened import is_flattened

__all__ = ["alike", "short", "unlike"]


def unlike(found: Any, wanted: Any, *, same_type: bool = True) -> str:
    """Return how a tensor differs in kind, shape or dtype; "" if it does not.

    Args:
        wanted: a tensor, what `plain_state` makes of a tensor subclass, or a dictionary of these; anything fits
            other values.
    """
    if isinstance(wanted, Mapping):
        compare = (
            _unlike_shards
            if TENSOR_SHARDS in wanted
            else _unlike_flattened
            if TENSOR_CLASS in wanted
            else _unlike_mapping
        )
        return compare(found, wanted)
    if not isinstance(wanted, Tensor):
        return ""
    if not isinstance(found, Tensor):
        return f"is {_kind_of(found)} there and a tensor here"
    if found.shape != wanted.shape:
        return f"is {list(found.shape)} there and {list(wanted.shape)} here"
    castable = found.is_floating_point() and wanted.is_floating_point() and not same_type
    if found.dtype is not wanted.dtype and not castable:
        return f"is {found.dtype} there and {wanted.dtype} here"
    return ""


def _unlike_shards(found: Any, wanted: Mapping[str, Any]) -> str:
    """Compare the parts of a sharded tensor, which are of as many ranks or do not fit."""
    parts = found.get(TENSOR_SHARDS) if isinstance(found, Mapping) else None
    if not isinstance(parts, list) or len(parts) != len(wanted[TENSOR_SHARDS]):
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    faults = (unlike(part, each) for part, each in zip(parts, wanted[TENSOR_SHARDS], strict=True))
    return next((f"has a shard that {fault}" for fault in faults if fault), "")


def _unlike_flattened(found: Any, wanted: Mapping[str, Any]) -> str:
    """Compare what a tensor subclass is made of.

    Its dtype is what it shows to others; the types of the tensors that it holds do not depend on it.
    """
    if not is_flattened(found) or found[TENSOR_CLASS] != wanted[TENSOR_CLASS]:
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    if set(found) != set(wanted):
        return f"lacks a part of {_kind_of(wanted)}"
    for name in ("shape", "stride", "attributes"):
        if not _made_alike(found[name], wanted[name]):
            return f"has {name} {short(found[name])} there and {short(wanted[name])} here"
    return _unlike_mapping(found["tensors"], wanted["tensors"])


def _unlike_mapping(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, Mapping):
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    if set(found) != set(wanted):
        return f"holds {short(list(found))} there and {short(list(wanted))} here"
    faults = ((name, unlike(found[name], inner)) for name, inner in wanted.items())
    return next((f"has {name}, which {fault}" for name, fault in faults if fault), "")


def _made_alike(found: Any, wanted: Any) -> bool:
    """Return whether two values are equal, where any floating dtype is as good as another."""
    if isinstance(wanted, list | tuple):
        same_size = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same_size and all(_made_alike(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(wanted, torch.dtype):
        return isinstance(found, torch.dtype) and found.is_floating_point == wanted.is_floating_point
    return alike(found, wanted)


def _kind_of(value: Any) -> str:
    if is_flattened(value):
        return f"of class {str(value[TENSOR_CLASS]).rpartition('.')[2][:60]}"
    if isinstance(value, Mapping) and TENSOR_SHARDS in value:
        count = len(value[TENSOR_SHARDS]) if isinstance(value[TENSOR_SHARDS], list) else "some"
        return f"in shards of {count} ranks"
    return "a whole tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def alike(found: Any, wanted: Any) -> bool:
    """Return whether two plain values or tensors are equal, of the same type."""
    if isinstance(wanted, list | tuple):
        same_size = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same_size and all(alike(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(found, Tensor) or isinstance(wanted, Tensor):
        both = isinstance(found, Tensor) and isinstance(wanted, Tensor)
        return both and not unlike(found, wanted) and equal(found, wanted)
    numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
    same_kind = isinstance(found, bool) == isinstance(wanted, bool) if numbers else type(found) is type(wanted)
    return same_kind and bool(found == wanted)


def short(value: Any) -> str:
    """Return a value as a few words of a message."""
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
