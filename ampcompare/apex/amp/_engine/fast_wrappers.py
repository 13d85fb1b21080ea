"""Wrappers with the signatures of the functions that a step calls most: linear layers, operators, in-place arithmetic.

An exact signature packs no arguments, which is most of what a wrapper costs. Whatever is not the plain case goes to
the general wrapper of the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .casts import plain_cast

if TYPE_CHECKING:
    from ampcompare.apex.amp.handle import AmpHandle

    from .casts import Cast

__all__ = ["lean_in_place", "lean_linear", "lean_promotion"]

Function = Callable[..., Any]

_FLOAT32 = torch.float32
_NUMBERS = frozenset({int, float, bool})
_MISSING: Any = object()


def lean_linear(original: Function, general: Function, convert: Cast, cast_weight: Cast, handle: AmpHandle) -> Function:
    """Return `F.linear` for a tensor as input and fp32 parameters.

    Args:
        convert: casts a tensor to half.
        cast_weight: casts an fp32 parameter to half, or returns its cached cast.
    """
    cuda_only = handle.cuda_only
    cache = handle.cache
    half_dtype = handle.half_dtype
    half = plain_cast(half_dtype)
    is_grad_enabled = torch.is_grad_enabled

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if not handle._is_active:
            return original(input, weight, bias)
        if (
            input.__class__ is not Tensor
            or weight.__class__ is not Parameter
            or weight.dtype is not _FLOAT32
            or not (bias is None or (bias.__class__ is Parameter and bias.dtype is _FLOAT32))
            or (cuda_only and not weight.is_cuda)
        ):
            return general(input, weight, bias)
        dtype = input.dtype
        if dtype is _FLOAT32:
            input = convert(input)
        elif dtype is not half_dtype:
            return general(input, weight, bias)
        # Inlines `cast_weight` for a weight that is not in the cache, the usual case for a layer.
        keep = is_grad_enabled()
        key = id(weight)
        if key in cache or weight.is_cuda:
            half_weight = cast_weight(weight)
        else:
            half_weight = half(weight)
            if keep:
                cache[key] = (weight, half_weight, weight._version, weight.data_ptr())
        if bias is None:
            return original(input, half_weight)
        key = id(bias)
        if key in cache or bias.is_cuda:
            return original(input, half_weight, cast_weight(bias))
        half_bias = half(bias)
        if keep:
            cache[key] = (bias, half_bias, bias._version, bias.data_ptr())
        return original(input, half_weight, half_bias)

    return linear


def lean_promotion(name: str, original: Function, general: Function, handle: AmpHandle) -> Function:
    """Return the wrapper of a method of tensors that promotes half to float, or `general` if it has no short form."""
    if name == "add":

        def add(self: Any, other: Any = _MISSING, old_form: Any = _MISSING, *, alpha: Any = _MISSING) -> Any:
            if other is not _MISSING and old_form is _MISSING:
                kind = other.__class__
                if (
                    not handle._is_active
                    or kind in _NUMBERS
                    or ((kind is Tensor or kind is Parameter) and self.dtype is other.dtype)
                ):
                    return original(self, other) if alpha is _MISSING else original(self, other, alpha=alpha)
            return general(self, *_given(other, old_form), **_named(alpha=alpha))

        return add
    if not name.startswith("__"):
        return general

    def operator(self: Any, other: Any) -> Any:
        kind = other.__class__
        if (
            not handle._is_active
            or kind in _NUMBERS
            or ((kind is Tensor or kind is Parameter) and self.dtype is other.dtype)
        ):
            return original(self, other)
        return general(self, other)

    return operator


def lean_in_place(name: str, original: Function, general: Function, handle: AmpHandle) -> Function:
    """Return the wrapper of an in-place method, which an optimizer's step calls with casts off."""
    if name == "mul_":

        def mul_(self: Any, other: Any) -> Any:
            return general(self, other) if handle._is_active else original(self, other)

        return mul_
    if name == "add_":

        def add_(self: Any, other: Any = _MISSING, old_form: Any = _MISSING, *, alpha: Any = _MISSING) -> Any:
            if handle._is_active or old_form is not _MISSING or other is _MISSING:
                return general(self, *_given(other, old_form), **_named(alpha=alpha))
            return original(self, other) if alpha is _MISSING else original(self, other, alpha=alpha)

        return add_
    if name in ("addcmul_", "addcdiv_"):

        def ternary(
            self: Any,
            tensor1: Any = _MISSING,
            tensor2: Any = _MISSING,
            old_form: Any = _MISSING,
            *,
            value: Any = _MISSING,
        ) -> Any:
            if handle._is_active or old_form is not _MISSING or value is _MISSING or tensor2 is _MISSING:
                return general(self, *_given(tensor1, tensor2, old_form), **_named(value=value))
            return original(self, tensor1, tensor2, value=value)

        return ternary
    return general


def _given(*values: Any) -> list[Any]:
    return [value for value in values if value is not _MISSING]


def _named(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not _MISSING}
