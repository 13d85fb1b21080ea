"""Scaling, sums and norms of lists of tensors; overflow flags stay on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply.fp32_views import to_fp32, write_back
from ampcompare.tensors.lists import by_type, copy_by_dtype

__all__ = ["axpby", "global_norm", "non_finite", "per_tensor_norms", "scale", "update_scale_with_hysteresis"]

_CHUNK = 65536


def scale(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float) -> Tensor:
    """Write `inputs * factor` into `outputs`, computed in fp32 and rounded once; an output may be its own input.

    Returns:
        fp32 tensor of shape (): 1 where any element of `inputs` is inf or NaN, else 0.
    """
    overflow = torch.zeros((), dtype=torch.float32, device=inputs[0].device)
    # A narrow output is written only once the product is known: casting into it first would round twice.
    work = [
        target if target is source or target.dtype is torch.float32 else torch.empty_like(source, dtype=torch.float32)
        for source, target in zip(inputs, outputs, strict=True)
    ]
    write_back(work, inputs)
    multiplier = torch.full((), factor, dtype=torch.float32, device=overflow.device)
    for group in by_type(work):
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow, multiplier)
    write_back(outputs, work)
    return overflow


def axpby(xs: Sequence[Tensor], ys: Sequence[Tensor], outputs: Sequence[Tensor], a: float, b: float) -> None:
    """Write `a * x + b * y` into `outputs`, computed in fp32 and rounded once."""
    sums = torch._foreach_mul(to_fp32(xs), a)
    torch._foreach_add_(sums, to_fp32(ys), alpha=b)
    copy_by_dtype(outputs, sums)


def non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a bool tensor of shape (): whether any element of `tensors` is inf or NaN. Nothing is written."""
    return ~torch.isfinite(per_tensor_norms(tensors, math.inf)).all()


def per_tensor_norms(tensors: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the norm of each tensor, accumulated in `dtype`: shape (n,). An empty tensor has norm 0."""
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    norms = torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    if filled:
        norms_of_filled = _norms_of_filled([tensors[index] for index in filled], order, dtype)
        stacked = torch.stack(list(norms_of_filled))
        if len(filled) == len(tensors):
            return stacked
        norms[filled] = stacked
    return norms


def _norms_of_filled(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
    sizes = [tensor.numel() for tensor in tensors]
    if tensors[0].device.type != "cpu" or max(sizes) <= _CHUNK:
        return _norms_by_dtype(tensors, order, dtype)
    # torch's CPU kernel adds squares one after another: at 8 million elements an fp32 norm is off by 2e-4.
    chunks = [chunk for tensor in tensors for chunk in tensor.reshape(-1).split(_CHUNK)]
    parts = torch.stack(_norms_by_dtype(chunks, order, dtype))
    return torch._foreach_norm(list(parts.split([-(-size // _CHUNK) for size in sizes])), order, dtype=dtype)


def _norms_by_dtype(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norms in the order of the tensors, by one call for each of their dtypes."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    norms: dict[int, Tensor] = {}
    for indices in groups.values():
        group_norms = torch._foreach_norm([tensors[index] for index in indices], order, dtype=dtype)
        norms.update(zip(indices, group_norms, strict=True))
    return [norms[index] for index in range(len(tensors))]


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all elements taken together: shape (1,), fp32."""
    norm: Tensor = torch.linalg.vector_norm(per_tensor_norms(tensors))
    return norm.reshape(1)


def update_scale_with_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Move a loss scale that backs off only after `hysteresis` overflows without a clean step between; no host sync.

    All tensors have one element; `current_scale` and `found_inf` are fp32, the trackers int32. The first three are
    updated in place, and `current_scale` is returned. A growth that would leave fp32's range is not made, and
    a scale below its normal numbers becomes 0.
    """
    overflow = found_inf.reshape(current_scale.shape) > 0
    remaining = hysteresis_tracker.reshape(current_scale.shape) - overflow.to(hysteresis_tracker.dtype)
    backs_off = overflow & (remaining <= 0)
    clean = growth_tracker.reshape(current_scale.shape) + 1
    due = ~overflow & (clean == growth_interval)
    grown = (current_scale.double() * growth_factor).to(current_scale.dtype)
    reduced = (current_scale.double() * backoff_factor).to(current_scale.dtype)
    # Apex's kernel flushes subnormal numbers; a scale must not depend on the device.
    reduced = torch.where(reduced < torch.finfo(reduced.dtype).tiny, 0.0, reduced)
    current_scale.copy_(torch.where(backs_off, reduced, torch.where(due & torch.isfinite(grown), grown, current_scale)))
    growth_tracker.copy_(torch.where(overflow | due, torch.zeros_like(clean), clean).reshape(growth_tracker.shape))
    renewed = torch.where(overflow, remaining, torch.full_like(remaining, hysteresis))
    hysteresis_tracker.copy_(renewed.reshape(hysteresis_tracker.shape))
    return current_scale
