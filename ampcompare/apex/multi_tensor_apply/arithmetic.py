"""Scaling, sums and norms of lists of tensors; overflow flags stay on the device.

For `torch._foreach_mul(tensors, scalars)` torch has no multi-tensor kernel: on CUDA it launches one kernel for each
tensor. Here the small tensors share one product over a flat copy. A large tensor keeps its own launch, which fills the
device and needs no copy. Each element is computed by the same operation in the same dtype, so the bits are the same.
"""

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.lists import copy_tensors_by_dtype, group_tensors_by_type, is_dense

_CHUNK = 65536
# Where a launch costs more than the copies.
_DEVICE_TYPES = frozenset({"cuda"})
_MAX_SHARED_ELEMENTS = 2**18
_MIN_SHARED_TENSORS = 8


def scale_into(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float) -> Tensor:
    """Write `inputs * factor` into `outputs`, computed in fp32 and rounded once; an output may be its own input.

    Returns:
        fp32 tensor of shape (): 1 where any element of `inputs` is inf or NaN, else 0.
    """
    overflow = torch.zeros((), dtype=torch.float32, device=inputs[0].device)
    # A narrow output is written only once the product is known: casting into it first would round twice.
    work = []
    for source, target in zip(inputs, outputs, strict=True):
        is_usable = target is source or target.dtype is torch.float32
        work.append(target if is_usable else torch.empty_like(source, dtype=torch.float32))
    copy_into_targets(work, inputs)
    multiplier = torch.full((), factor, dtype=torch.float32, device=overflow.device)
    for group in group_tensors_by_type(work):
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow, multiplier)
    copy_into_targets(outputs, work)
    return overflow


def add_scaled_into(
    xs: Sequence[Tensor], ys: Sequence[Tensor], outputs: Sequence[Tensor], a: float, b: float
) -> None:
    """Write `a * x + b * y` into `outputs`, computed in fp32 and rounded once."""
    sums = torch._foreach_mul(as_fp32_tensors(xs), a)
    torch._foreach_add_(sums, as_fp32_tensors(ys), alpha=b)
    copy_tensors_by_dtype(outputs, sums)


def any_non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a bool tensor of shape (): whether any element of `tensors` is inf or NaN. Nothing is written."""
    return ~torch.isfinite(per_tensor_norms(tensors, math.inf)).all()


def per_tensor_norms(
    tensors: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the norm of each tensor, accumulated in `dtype`: shape (n,). An empty tensor has norm 0."""
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    norms = torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    if filled:
        norms_of_filled = _norms_of_nonempty([tensors[index] for index in filled], order, dtype)
        stacked = torch.stack(list(norms_of_filled))
        if len(filled) == len(tensors):
            return stacked
        norms[filled] = stacked
    return norms


def _norms_of_nonempty(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
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
    current_scale.copy_(
        torch.where(backs_off, reduced, torch.where(due & torch.isfinite(grown), grown, current_scale))
    )
    growth_tracker.copy_(
        torch.where(overflow | due, torch.zeros_like(clean), clean).reshape(growth_tracker.shape)
    )
    renewed = torch.where(overflow, remaining, torch.full_like(remaining, hysteresis))
    hysteresis_tracker.copy_(renewed.reshape(hysteresis_tracker.shape))
    return current_scale


def rounded_to_fp32(value: float) -> float:
    """Return `value` rounded to fp32, as Apex's kernels receive their numbers.

    It matters for a beta near 1: the kernels compute `1 - 0.999f`, which is 1.3e-5 below 0.001.
    """
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def as_fp32_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor itself where it is fp32, else an fp32 copy of it; shapes and order are kept."""
    work = list(tensors)
    _replace_by_fp32_copies(
        work, [i for i, tensor in enumerate(tensors) if tensor.dtype is not torch.float32]
    )
    return work


def fp32_lists_laid_out_alike(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the lists as fp32 tensors whose storages can be iterated together.

    torch's fused kernels read the n-th element in memory of all tensors of a row, so a row of different strides (a
    channels-last weight with a contiguous gradient) or with gaps would be silently mixed up on CPU. Such rows get
    contiguous copies; anything that is fp32 and laid out alike is returned as it is.
    """
    work = [list(tensors) for tensors in lists]
    copied: list[list[int]] = [[] for _ in lists]
    reshaped: list[list[int]] = [[] for _ in lists]
    for index, row in enumerate(zip(*lists, strict=True)):
        alike = _are_laid_out_alike(row)
        for column, tensor in enumerate(row):
            if not alike:
                reshaped[column].append(index)
            elif tensor.dtype is not torch.float32:
                copied[column].append(index)
    for tensors, plain, strided in zip(work, copied, reshaped, strict=True):
        _replace_by_fp32_copies(tensors, plain)
        _replace_by_fp32_copies(tensors, strided, memory_format=torch.contiguous_format)
    return work


def copy_into_targets(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, rounding to the target's dtype; pairs that are one object are left alone."""
    pairs = [(target, value) for target, value in zip(targets, values, strict=True) if target is not value]
    if pairs:
        copy_tensors_by_dtype([target for target, _ in pairs], [value for _, value in pairs])


def _replace_by_fp32_copies(
    tensors: list[Tensor], indices: Sequence[int], memory_format: torch.memory_format = torch.preserve_format
) -> None:
    if not indices:
        return
    sources = [tensors[i] for i in indices]
    copies = [
        torch.empty_like(source, dtype=torch.float32, memory_format=memory_format) for source in sources
    ]
    copy_tensors_by_dtype(copies, sources)
    for i, copy in zip(indices, copies, strict=True):
        tensors[i] = copy


def _are_laid_out_alike(row: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in row):
        return True
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(row[0].ndim)
    return channels_last is not None and all(
        tensor.is_contiguous(memory_format=channels_last) for tensor in row
    )


def multiply_each(tensors: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
    """Return the product of each tensor and its element of `factors`, shape (n,)."""
    return _apply_to_each(torch.mul, torch._foreach_mul, tensors, factors)


def divide_each(tensors: Sequence[Tensor], divisors: Tensor) -> list[Tensor]:
    """Return the quotient of each tensor and its element of `divisors`, shape (n,)."""
    return _apply_to_each(torch.div, torch._foreach_div, tensors, divisors)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by its element of `factors`, shape (n,), in place."""
    scalars = list(factors.unbind())
    shared, others = _indices_of_shared_and_others(tensors, factors)
    if shared:
        targets = [tensors[index] for index in shared]
        torch._foreach_copy_(
            targets, _apply_to_flattened(torch.mul, targets, [scalars[index] for index in shared])
        )
    if others:
        torch._foreach_mul_([tensors[index] for index in others], [scalars[index] for index in others])


def _apply_to_each(
    single: Any, listed: Callable[..., Any], tensors: Sequence[Tensor], scalars: Tensor
) -> list[Tensor]:
    shared, others = _indices_of_shared_and_others(tensors, scalars)
    each = scalars.unbind()
    results: dict[int, Tensor] = {}
    for operation, indices in ((partial(_apply_to_flattened, single), shared), (listed, others)):
        if indices:
            chosen_tensors, chosen_scalars = [tensors[i] for i in indices], [each[i] for i in indices]
            results.update(zip(indices, operation(chosen_tensors, chosen_scalars), strict=True))
    return [results[index] for index in range(len(tensors))]


def _indices_of_shared_and_others(tensors: Sequence[Tensor], scalars: Tensor) -> tuple[list[int], list[int]]:
    """Return the indices of the tensors that share one product, and those of the others."""
    shared: list[int] = []
    others: list[int] = []
    on_device = scalars.device.type in _DEVICE_TYPES
    for index, tensor in enumerate(tensors):
        # Another dtype would be promoted by the flat product, but not by a product with a scalar.
        fits = on_device and tensor.numel() <= _MAX_SHARED_ELEMENTS and tensor.dtype is scalars.dtype
        if fits and tensor.layout is torch.strided and is_dense(tensor):
            shared.append(index)
        else:
            others.append(index)
    return (shared, others) if len(shared) >= _MIN_SHARED_TENSORS else ([], list(range(len(tensors))))


def _apply_to_flattened(single: Any, tensors: Sequence[Tensor], scalars: Sequence[Tensor]) -> list[Tensor]:
    # In the order of memory, so that results have the strides of their tensors, as multi-tensor kernels require.
    flat = torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors])
    # `repeat_interleave` would need the sizes on the device, and the copy would wait for it.
    expanded = torch.cat(
        [scalar.expand(tensor.numel()) for tensor, scalar in zip(tensors, scalars, strict=True)]
    )
    single(flat, expanded, out=flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
        for part, tensor in zip(parts, tensors, strict=True)
    ]
