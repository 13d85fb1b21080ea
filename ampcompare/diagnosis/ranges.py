"""The range of a tensor as a row of counts: a histogram of exponents from the bits of fp32, in a few operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ampcompare.records.diagnosis import Range

__all__ = ["WIDTH", "counts_of", "make_range", "merge", "range_row"]

aten = torch.ops.aten
BINS = 256  # of the biased exponent of fp32: 0 holds zeros and fp32 subnormals, 255 what is not finite
BIAS = 127
ZEROS, LOST, SMALLEST, LARGEST, WIDTH = BINS, BINS + 1, BINS + 2, BINS + 3, BINS + 4
MAGNITUDE = 0x7FFFFFFF
NOTHING = MAGNITUDE + 1  # above the bits of every magnitude
INFINITY = 0x7F800000
FP16_SMALLEST_NORMAL, FP16_SMALLEST, FP16_TOP = -14, -24, 15


def range_row(tensor: Tensor, exact: Tensor | None = None) -> Tensor:
    """Return the counts of a floating tensor, on its device; float64 is read as fp32.

    Args:
        exact: the same tensor in a wider type; what is zero here and not there counts as lost.

    Returns:
        (WIDTH,) int64: elements by biased exponent, zeros, lost, and the bits of the smallest magnitude that is not
        zero and of the largest that is finite.
    """
    row = torch.zeros(WIDTH, dtype=torch.int64, device=tensor.device)
    row[SMALLEST] = NOTHING
    if tensor.numel() == 0:
        return row
    values = tensor.detach().reshape(-1)
    # bf16 is the upper half of fp32: its bits serve as they are.
    bits = values.view(torch.int16) if values.dtype is torch.bfloat16 else values.float().view(torch.int32)
    fraction = 7 if values.dtype is torch.bfloat16 else 23
    mask = MAGNITUDE >> 16 if fraction == 7 else MAGNITUDE
    sizes = aten.bitwise_and.Scalar(bits, mask)
    row[:BINS] = _histogram(aten.bitwise_right_shift.Tensor_Scalar(bits, fraction).to(torch.uint8))  # drops the sign
    on_host = tensor.device.type == "cpu"  # elsewhere to read a count would wait for the device
    infinity = INFINITY >> 16 if fraction == 7 else INFINITY
    least, most = torch.aminmax(sizes)
    if not on_host or int(row[BINS - 1]):
        most = torch.aminmax(aten.masked_fill.Scalar(sizes, sizes >= infinity, 0))[1]
    if not on_host or int(least) == 0:
        row[ZEROS] = sizes.numel() - aten.count_nonzero(sizes)
        # Zero becomes the largest number, so that it is never the smallest; to fill it in takes five times as long.
        least = torch.aminmax(aten.bitwise_and.Scalar(sizes - 1, mask))[0].long() + 1
        if exact is not None:
            row[LOST] = aten.count_nonzero(aten.logical_and(sizes.view(exact.shape) == 0, exact != 0))
    row[SMALLEST], row[LARGEST] = least, most
    if fraction == 7:
        row[SMALLEST:WIDTH] <<= 16
    return row


def _histogram(exponents: Tensor) -> Tensor:
    if exponents.device.type == "cpu":
        return torch.bincount(exponents, minlength=BINS)
    return torch.histc(exponents.float(), BINS, 0, BINS).long()  # bincount would wait for the device


def merge(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the row of all elements of several rows."""
    stacked = np.stack(rows)
    total: np.ndarray = stacked.sum(axis=0)
    total[SMALLEST], total[LARGEST] = stacked[:, SMALLEST].min(), stacked[:, LARGEST].max()
    return total


def counts_of(row: np.ndarray) -> tuple[int, int, int]:
    """Return the elements of a row, those that are not finite, and those that are lost."""
    return int(row[:BINS].sum()), int(row[BINS - 1]), int(row[LOST])


def make_range(row: np.ndarray) -> Range:
    """Return what a row says, in plain numbers."""
    counts = row[:BINS]
    by_exponent = {number - BIAS: int(count) for number, count in enumerate(counts) if count and number < BINS - 1}
    zeros = int(row[ZEROS])
    if zeros and counts[0] == zeros:
        by_exponent.pop(-BIAS)
    elif zeros:
        by_exponent[-BIAS] -= zeros
    elements = int(counts.sum())
    has_values = int(row[LARGEST]) > 0
    return Range(
        elements=elements,
        zeros=zeros,
        subnormal=sum(count for power, count in by_exponent.items() if power < FP16_SMALLEST_NORMAL),
        below=sum(count for power, count in by_exponent.items() if power < FP16_SMALLEST - 1),
        lost=int(row[LOST]),
        top=by_exponent.get(FP16_TOP, 0),
        above=sum(count for power, count in by_exponent.items() if power > FP16_TOP),
        nonfinite=int(counts[BINS - 1]),
        smallest=_magnitude(row[SMALLEST]) if has_values else None,
        largest=_magnitude(row[LARGEST]) if has_values else None,
        exponents=by_exponent,
    )


def _magnitude(bits: int) -> float:
    return float(np.array(bits, dtype=np.int32).view(np.float32))
