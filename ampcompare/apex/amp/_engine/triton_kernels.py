"""O2's copies as two Triton kernels: half gradients to unscaled fp32 ones with the overflow check, and masters to half.

Each is one launch for all tensors, of mixed dtypes and sizes, and gives the bits of torch's kernels; a NaN stays a NaN.
A kernel reads the addresses of tensors from a table.

Importing this needs `triton`, which torch's wheels for CUDA bring along. With `TRITON_INTERPRET=1` in the environment
before the import, kernels run on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["INTERPRETED", "round_into", "unscale_into"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_CHUNK = 16384  # elements of one program
_BLOCK = 1024  # elements of one step of its loop
_MAX_TABLES = 16


@triton.jit  # type: ignore[untyped-decorator]
def _unscale(tensors, chunks, flag, inverse, ALIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tensor = tensors + 3 * tl.load(chunks + 3 * row)
    first = tl.load(chunks + 3 * row + 1)
    count = tl.load(chunks + 3 * row + 2)
    source = tl.load(tensor)
    target = tl.multiple_of(tl.load(tensor + 1).to(tl.pointer_type(tl.float32)), ALIGN)
    kind = tl.load(tensor + 2)
    factor = tl.load(inverse)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        if kind == 0:
            half = tl.multiple_of(source.to(tl.pointer_type(tl.float16)), ALIGN)
            value = tl.load(half + first + index, mask=inside, other=0.0).to(tl.float32)
        elif kind == 1:
            upper = tl.multiple_of(source.to(tl.pointer_type(tl.uint16)), ALIGN)
            bits = tl.load(upper + first + index, mask=inside, other=0).to(tl.uint32) << 16
            value = bits.to(tl.float32, bitcast=True)
        else:
            full = tl.multiple_of(source.to(tl.pointer_type(tl.float32)), ALIGN)
            value = tl.load(full + first + index, mask=inside, other=0.0)
        exponent = value.to(tl.int32, bitcast=True) & 0x7F800000
        tl.store(flag + index * 0, 1.0, mask=inside & (exponent == 0x7F800000))
        tl.store(target + first + index, value * factor, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _round(tensors, chunks, ALIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tensor = tensors + 3 * tl.load(chunks + 3 * row)
    first = tl.load(chunks + 3 * row + 1)
    count = tl.load(chunks + 3 * row + 2)
    source = tl.multiple_of(tl.load(tensor).to(tl.pointer_type(tl.float32)), ALIGN)
    target = tl.load(tensor + 1)
    kind = tl.load(tensor + 2)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(source + first + index, mask=inside, other=0.0)
        if kind == 0:
            half = tl.multiple_of(target.to(tl.pointer_type(tl.float16)), ALIGN)
            tl.store(half + first + index, value.to(tl.float16), mask=inside)
        else:
            # To the nearest, ties to even, by integers: adding less than half a unit, or half of it to an odd number,
            # carries into the upper 16 bits.
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
            upper = tl.multiple_of(target.to(tl.pointer_type(tl.uint16)), ALIGN)
            tl.store(upper + first + index, rounded.to(tl.uint16), mask=inside)


def unscale_into(targets: Sequence[Tensor], sources: Sequence[Tensor], flag: Tensor, inverse: Tensor) -> bool:
    """Write `source * inverse`, computed in fp32, into each target, and set `flag` if a source is not finite.

    Args:
        targets: fp32; each has shape and strides of its source, and may be the source.
        sources: float16, bfloat16 or float32.
        flag, inverse: fp32 scalars on the device of the tensors.

    Returns:
        False if nothing was done, because these tensors are not for a kernel: sparse, with gaps in memory, on several
        devices, or on a CPU.
    """
    if not _suits(wide=targets, other=sources):
        return False
    chunks, tensors, align = _tables.of(sources, targets, kinds=sources)
    with torch.cuda.device_of(targets[0]):
        _unscale[(len(chunks),)](tensors, chunks, flag, inverse, ALIGN=align, BLOCK=_BLOCK)
    return True


def round_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Round each fp32 source into its float16 or bfloat16 target, to the nearest, ties to even.

    Returns:
        False if nothing was done, as for `unscale_into`.
    """
    if any(target.dtype is torch.float32 for target in targets) or not _suits(wide=sources, other=targets):
        return False
    chunks, tensors, align = _tables.of(sources, targets, kinds=targets)
    with torch.cuda.device_of(targets[0]):
        _round[(len(chunks),)](tensors, chunks, ALIGN=align, BLOCK=_BLOCK)
    for target in targets:  # as any operation in place does, for autograd's checks
        increment_version(target)
    return True


def _suits(*, wide: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    if not wide or not (wide[0].is_cuda or INTERPRETED):
        return False
    device = wide[0].device
    for one, two in zip(wide, other, strict=True):
        if one.layout is not torch.strided or two.layout is not torch.strided:
            return False
        if one.dtype is not torch.float32 or two.dtype not in _KINDS or one.device != device or two.device != device:
            return False
        if one.stride() != two.stride() or one.shape != two.shape or not _is_dense(one):
            return False
    return any(tensor.numel() for tensor in wide)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


class _Tables:
    """Tables of tensors and of chunks on the device, kept as long as addresses and sizes come again."""

    def __init__(self) -> None:
        self._chunks: dict[Any, Tensor] = {}
        self._tensors: dict[Any, Tensor] = {}

    def of(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], *, kinds: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, int]:
        """Return chunks (tensor, first, count), tensors (two addresses, dtype), and a divisor of all addresses."""
        device = sources[0].device
        sizes = tuple([source.numel() for source in sources])
        chunks = self._chunks.get((device, sizes))
        if chunks is None:
            rows = [
                (index, first, min(_CHUNK, size - first))
                for index, size in enumerate(sizes)
                for first in range(0, size, _CHUNK)
            ]
            chunks = _remember(self._chunks, (device, sizes), _on_device(rows, device))
        entries = tuple(
            [
                (source.data_ptr(), target.data_ptr(), _KINDS[kind.dtype])
                for source, target, kind in zip(sources, targets, kinds, strict=True)
            ]
        )
        tensors = self._tensors.get((device, entries))
        if tensors is None:
            tensors = _remember(self._tensors, (device, entries), _on_device(entries, device))
        return chunks, tensors, 16 if all((one | two) % 16 == 0 for one, two, _ in entries) else 1


def _remember(tables: dict[Any, Tensor], key: Any, table: Tensor) -> Tensor:
    if len(tables) >= _MAX_TABLES:
        del tables[next(iter(tables))]
    tables[key] = table
    return table


def _on_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return an int64 table; the copy to a GPU waits for nothing, since it is made from pinned memory."""
    if device.type != "cuda":
        return torch.tensor(rows, dtype=torch.int64)
    return torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


_tables = _Tables()
