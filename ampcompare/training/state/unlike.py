"""How a value of a checkpoint differs from that of the run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, equal

__all__ = ["alike", "short", "unlike"]


def unlike(found: Any, wanted: Any, *, same_type: bool = True) -> str:
    """Return how a tensor differs in kind, shape or dtype; "" if it does not."""
    if not isinstance(wanted, Tensor):
        return ""
    if not isinstance(found, Tensor):
        return f"is a {type(found).__name__} there and a tensor here"
    if found.shape != wanted.shape:
        return f"is {list(found.shape)} there and {list(wanted.shape)} here"
    castable = found.is_floating_point() and wanted.is_floating_point() and not same_type
    if found.dtype is not wanted.dtype and not castable:
        return f"is {found.dtype} there and {wanted.dtype} here"
    return ""


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
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
