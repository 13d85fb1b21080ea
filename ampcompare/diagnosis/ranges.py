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
    values = aten._to_copy(tensor.detach(), dtype=torch.float32) if tensor.dtype is not torch.float32 else tensor
    bits = aten.bitwise_and.Scalar(aten.reshape(values.detach(), [-1]).view(torch.int32), MAGNITUDE)
    row = torch.zeros(WIDTH, dtype=torch.int64, device=tensor.device)
    if bits.numel() == 0:
        row[SMALLEST] = NOTHING
        return row
    exponents = aten.bitwise_right_shift.Tensor_Scalar(bits, 23)
    row[:BINS] = _histogram(exponents)
    row[ZEROS] = bits.numel() - aten.count_nonzero(bits)
    # Zero becomes the largest number, so that it is never the smallest.
    row[SMALLEST] = torch.aminmax(aten.bitwise_and.Scalar(bits - 1, MAGNITUDE))[0].long() + 1
    row[LARGEST] = torch.aminmax(bits)[1]
    if bits.device.type != "cpu" or int(row[BINS - 1]):  # on a GPU to read the count would wait for it
        row[LARGEST] = torch.aminmax(aten.masked_fill.Scalar(bits, bits >= INFINITY, 0))[1]
    if exact is not None:
        row[LOST] = aten.count_nonzero(aten.logical_and(bits.view(exact.shape) == 0, exact != 0))
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
