"""Multiply or divide each tensor of a list by its own scalar, which stays on the device.

For `torch._foreach_mul(tensors, scalars)` torch has no multi-tensor kernel: on CUDA it launches one kernel for each
tensor. Here the small tensors share one product over a flat copy. A large tensor keeps its own launch, which fills the
device and needs no copy. Each element is computed by the same operation in the same dtype, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["divide_each", "multiply_each", "multiply_each_"]

# Where a launch costs more than the copies.
_DEVICE_TYPES = frozenset({"cuda"})
_MAX_SHARED_ELEMENTS = 2**18
_MIN_SHARED_TENSORS = 8


def multiply_each(tensors: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
    """Return the product of each tensor and its element of `factors`, shape (n,)."""
    return _apply_each(torch.mul, torch._foreach_mul, tensors, factors)


def divide_each(tensors: Sequence[Tensor], divisors: Tensor) -> list[Tensor]:
    """Return the quotient of each tensor and its element of `divisors`, shape (n,)."""
    return _apply_each(torch.div, torch._foreach_div, tensors, divisors)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by its element of `factors`, shape (n,), in place."""
    scalars = list(factors.unbind())
    shared, others = _split(tensors, factors)
    if shared:
        targets = [tensors[index] for index in shared]
        torch._foreach_copy_(targets, _apply_flat(torch.mul, targets, [scalars[index] for index in shared]))
    if others:
        torch._foreach_mul_([tensors[index] for index in others], [scalars[index] for index in others])


def _apply_each(single: Any, listed: Callable[..., Any], tensors: Sequence[Tensor], scalars: Tensor) -> list[Tensor]:
    shared, others = _split(tensors, scalars)
    each = scalars.unbind()
    results: dict[int, Tensor] = {}
    for operation, indices in ((partial(_apply_flat, single), shared), (listed, others)):
        if indices:
            chosen_tensors, chosen_scalars = [tensors[i] for i in indices], [each[i] for i in indices]
            results.update(zip(indices, operation(chosen_tensors, chosen_scalars), strict=True))
    return [results[index] for index in range(len(tensors))]


def _split(tensors: Sequence[Tensor], scalars: Tensor) -> tuple[list[int], list[int]]:
    """Return the indices of the tensors that share one product, and those of the others."""
    shared: list[int] = []
    others: list[int] = []
    on_device = scalars.device.type in _DEVICE_TYPES
    for index, tensor in enumerate(tensors):
        # Another dtype would be promoted by the flat product, but not by a product with a scalar.
        fits = on_device and tensor.numel() <= _MAX_SHARED_ELEMENTS and tensor.dtype is scalars.dtype
        (shared if fits and _is_dense(tensor) else others).append(index)
    return (shared, others) if len(shared) >= _MIN_SHARED_TENSORS else ([], list(range(len(tensors))))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and (
        tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _apply_flat(single: Any, tensors: Sequence[Tensor], scalars: Sequence[Tensor]) -> list[Tensor]:
    # In the order of memory, so that results have the strides of their tensors, as multi-tensor kernels require.
    flat = torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors])
    # `repeat_interleave` would need the sizes on the device, and the copy would wait for it.
    expanded = torch.cat([scalar.expand(tensor.numel()) for tensor, scalar in zip(tensors, scalars, strict=True)])
    single(flat, expanded, out=flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
        for part, tensor in zip(parts, tensors, strict=True)
    ]
