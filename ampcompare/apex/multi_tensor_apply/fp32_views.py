"""fp32 views or copies of lists of tensors of any dtype: every list operation of this engine computes in fp32."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.tensors.lists import copy_by_dtype

__all__ = ["as_fp32", "flat_fp32_lists", "to_fp32", "write_back"]


def as_fp32(value: float) -> float:
    """Return `value` rounded to fp32, as Apex's kernels receive their numbers.

    It matters for a beta near 1: the kernels compute `1 - 0.999f`, which is 1.3e-5 below 0.001.
    """
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def to_fp32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor itself where it is fp32, else an fp32 copy of it; shapes and order are kept."""
    work = list(tensors)
    _replace(work, [i for i, tensor in enumerate(tensors) if tensor.dtype is not torch.float32])
    return work


def flat_fp32_lists(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the lists as fp32 tensors whose storages can be iterated together.

    torch's fused kernels read the n-th element in memory of all tensors of a row, so a row of different strides (a
    channels-last weight with a contiguous gradient) or with gaps would be silently mixed up on CPU. Such rows get
    contiguous copies; anything that is fp32 and laid out alike is returned as it is.
    """
    work = [list(tensors) for tensors in lists]
    copied: list[list[int]] = [[] for _ in lists]
    reshaped: list[list[int]] = [[] for _ in lists]
    for index, row in enumerate(zip(*lists, strict=True)):
        alike = _laid_out_alike(row)
        for column, tensor in enumerate(row):
            if not alike:
                reshaped[column].append(index)
            elif tensor.dtype is not torch.float32:
                copied[column].append(index)
    for tensors, plain, strided in zip(work, copied, reshaped, strict=True):
        _replace(tensors, plain)
        _replace(tensors, strided, memory_format=torch.contiguous_format)
    return work


def write_back(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, rounding to the target's dtype; pairs that are one object are left alone."""
    pairs = [(target, value) for target, value in zip(targets, values, strict=True) if target is not value]
    if pairs:
        copy_by_dtype([target for target, _ in pairs], [value for _, value in pairs])


def _replace(
    tensors: list[Tensor], indices: Sequence[int], memory_format: torch.memory_format = torch.preserve_format
) -> None:
    if not indices:
        return
    sources = [tensors[i] for i in indices]
    copies = [torch.empty_like(source, dtype=torch.float32, memory_format=memory_format) for source in sources]
    copy_by_dtype(copies, sources)
    for i, copy in zip(indices, copies, strict=True):
        tensors[i] = copy


def _laid_out_alike(row: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in row):
        return True
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(row[0].ndim)
    return channels_last is not None and all(tensor.is_contiguous(memory_format=channels_last) for tensor in row)
