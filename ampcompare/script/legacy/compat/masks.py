"""Masks of scripts for torch before 1.2: uint8 tensors of zeros and ones, in arithmetic too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ampcompare.script.legacy.compat.callers import called_by_script
from ampcompare.script.legacy.jit import keep_for_jit
from ampcompare.script.legacy.stderr import note

__all__ = ["patch"]

# Index of the mask among the positional arguments, `self` included.
METHODS = {
    "masked_fill": 1,
    "masked_fill_": 1,
    "masked_scatter": 1,
    "masked_scatter_": 1,
    "masked_select": 1,
    "where": 1,
}
FUNCTIONS = {"masked_fill": 1, "masked_scatter": 1, "masked_select": 1, "where": 0}
KEYWORDS = ("mask", "condition")


def patch() -> None:
    """Let operations accept uint8 masks, and let masks act as bytes in subtraction, `~` and `^`."""
    for name, index in METHODS.items():
        setattr(Tensor, name, _accepting_uint8(getattr(Tensor, name), index))
    for name, index in FUNCTIONS.items():
        original = getattr(torch, name)
        replacement = _accepting_uint8(original, index)
        setattr(torch, name, replacement)
        keep_for_jit(original, replacement)
    _patch_indexing()
    _patch_arithmetic()
    _patch_attention()


def _as_bool(mask: Any) -> Any:
    if isinstance(mask, Tensor) and mask.dtype is torch.uint8:
        note("a uint8 mask is used as a bool mask, as before torch 1.2")
        return mask.bool()
    return mask


def _accepting_uint8(original: Callable[..., Any], mask_index: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if len(args) > mask_index:
            args = (*args[:mask_index], _as_bool(args[mask_index]), *args[mask_index + 1 :])
        for name in KEYWORDS:
            if name in kwargs:
                kwargs[name] = _as_bool(kwargs[name])
        return original(*args, **kwargs)

    return operation


def _as_bool_index(index: Any) -> Any:
    if isinstance(index, (tuple, list)) and any(isinstance(entry, Tensor) for entry in index):
        return type(index)(_as_bool(entry) for entry in index)
    return _as_bool(index)


def _patch_indexing() -> None:
    get, put = Tensor.__getitem__, Tensor.__setitem__

    @functools.wraps(get)
    def get_item(self: Tensor, index: Any) -> Any:
        return get(self, _as_bool_index(index))

    @functools.wraps(put)
    def set_item(self: Tensor, index: Any, value: Any) -> None:
        put(self, _as_bool_index(index), value)

    Tensor.__getitem__ = get_item  # type: ignore[method-assign, assignment]
    Tensor.__setitem__ = set_item  # type: ignore[method-assign, assignment]
    for name in ("index_put", "index_put_"):
        _patch_index_put(name)


def _patch_index_put(name: str) -> None:
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def index_put(self: Tensor, indices: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _as_bool_index(indices), *args, **kwargs)

    setattr(Tensor, name, index_put)


def _as_bytes(operand: Any, idiom: str) -> Any:
    """Return the bytes of a bool tensor, and anything else as it is."""
    if isinstance(operand, Tensor) and operand.dtype is torch.bool:
        note(f"{idiom} counts a mask as bytes, as before torch 1.2")
        return operand.to(torch.uint8)
    return operand


def _patch_arithmetic() -> None:
    sub, rsub, invert, xor = Tensor.__sub__, Tensor.__rsub__, Tensor.__invert__, Tensor.__xor__

    @functools.wraps(sub)
    def subtract(self: Tensor, other: Any) -> Any:
        return sub(_as_bytes(self, "mask - x"), _as_bytes(other, "x - mask"))

    @functools.wraps(rsub)
    def subtract_from(self: Tensor, other: Any) -> Any:
        return rsub(_as_bytes(self, "1 - mask"), other)

    @functools.wraps(invert)
    def not_mask(self: Tensor) -> Any:
        # Bytes with other values are not a mask: their bits are inverted, as in torch since 1.2.
        if self.dtype is torch.uint8 and called_by_script() and self.numel() and int(self.max()) <= 1:
            note("~ of a uint8 mask is 1 - mask, as before torch 1.2")
            return 1 - self
        return invert(self)

    @functools.wraps(xor)
    def exclusive_or(self: Tensor, other: Any) -> Any:
        if self.dtype is torch.bool and type(other) is int:
            note("mask ^ 1 is a uint8 mask, as before torch 1.2")  # else an index of integers
            return xor(self.to(torch.uint8), other)
        return xor(self, other)

    patches = {"__sub__": subtract, "__rsub__": subtract_from, "__invert__": not_mask, "__xor__": exclusive_or}
    for name, patch in patches.items():
        setattr(Tensor, name, patch)


def _patch_attention() -> None:
    """Let attention layers accept uint8 masks, as torch 1.x did."""
    canonical = getattr(functional, "_canonical_mask", None)
    if canonical is None:
        return

    @functools.wraps(canonical)
    def canonical_mask(mask: Any, *args: Any, **kwargs: Any) -> Any:
        return canonical(_as_bool(mask), *args, **kwargs)

    functional._canonical_mask = canonical_mask
