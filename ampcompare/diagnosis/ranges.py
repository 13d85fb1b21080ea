"""The range of a tensor as a row of counts: a histogram of exponents from the bits of fp32, in a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ampcompare.runs.records.diagnosis import Range

__all__ = ["HALF", "WIDTH", "added", "counts_of", "lost_in", "make_range", "range_row", "range_rows", "widened"]

aten = torch.ops.aten
BINS = 256  # of the biased exponent of fp32: 0 holds zeros and fp32 subnormals, 255 what is not finite
BIAS = 127
ZEROS, LOST, SMALLEST, LARGEST, WIDTH = BINS, BINS + 1, BINS + 2, BINS + 3, BINS + 4
MAGNITUDE = 0x7FFFFFFF
NOTHING = MAGNITUDE + 1  # above the bits of every magnitude
HALF = (torch.float16, torch.bfloat16)
INFINITY = 0x7F800000
PATTERNS = 2**15  # of 16 bits without the sign
CHUNK = 2**18
SAMPLE = 2**12  # first elements that are looked at for zeros
MANY = 8  # a share of zeros of one in so many slows the count down: each addition waits for the one before
INFINITIES = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
FP16_SMALLEST_NORMAL, FP16_SMALLEST, FP16_TOP = -14, -24, 15


def range_row(tensor: Tensor, exact: Tensor | None = None) -> Tensor | np.ndarray:
    """Return the counts of a floating tensor, on its device; float64 is read as fp32.

    Args:
        exact: the same tensor in a wider type; what is zero here and not there counts as lost.

    Returns:
        (WIDTH,) int64: elements by biased exponent, zeros, lost, and the bits of the smallest magnitude that is not
        zero and of the largest that is finite. Of numpy for a tensor on the host, which needs no read later.
    """
    on_host = tensor.device.type == "cpu"
    if tensor.numel() == 0:
        row = np.zeros(WIDTH, dtype=np.int64)
        row[SMALLEST] = NOTHING
        return row if on_host else torch.from_numpy(row).to(tensor.device)
    values = tensor.detach().reshape(-1)
    wide = None if exact is None else exact.detach().reshape(-1)
    if not on_host:
        return _device_row(values, wide)
    row = _host_row(values)
    if row[ZEROS] and wide is not None:
        row[LOST] = lost_in(values, wide)
    return row


def range_rows(tensors: Sequence[Tensor], lost: Sequence[int]) -> np.ndarray:
    """Return the rows of flat fp32 tensors on the host, none of them empty, counted together.

    Args:
        lost: elements of each that count as lost.

    Returns:
        (tensors, WIDTH) int64.
    """
    lengths = [len(tensor) for tensor in tensors]
    starts = np.cumsum([0, *lengths[:-1]])
    sizes = _sizes(torch.cat(list(tensors)))
    owners = np.repeat(np.arange(0, BINS * len(lengths), BINS, dtype=np.int32), lengths)
    rows = np.zeros((len(lengths), WIDTH), dtype=np.int64)
    counts = torch.bincount(torch.from_numpy((sizes >> 23) + owners), minlength=BINS * len(lengths))
    rows[:, :BINS] = counts.numpy().reshape(-1, BINS)
    rows[:, LOST] = lost
    rows[:, ZEROS] = np.add.reduceat(sizes == 0, starts, dtype=np.int64)
    rows[:, SMALLEST] = np.minimum.reduceat(_shifted(sizes), starts)
    rows[:, SMALLEST] += 1
    rows[:, LARGEST] = np.maximum.reduceat(np.where(sizes < INFINITY, sizes, 0), starts)
    return rows


def lost_in(values: Tensor, exact: Tensor) -> int:
    """Return how many elements of a tensor on the host are zero, and are not in a wider type."""
    flat = values.detach().reshape(-1)
    is_zero = flat.view(torch.int16).numpy() << 1 == 0 if flat.dtype in HALF else _sizes(flat) == 0
    return int(np.count_nonzero(is_zero & (exact.detach().reshape(-1).numpy() != 0))) if is_zero.any() else 0


def _sizes(values: Tensor) -> np.ndarray:
    """Return the bits of magnitudes in fp32, int32."""
    sizes: np.ndarray = values.float().view(torch.int32).numpy() & np.int32(MAGNITUDE)
    return sizes


def _shifted(sizes: np.ndarray) -> np.ndarray:
    """Return magnitudes less one, with zero as the largest number, so that it is never the smallest."""
    return (sizes - np.int32(1)) & np.int32(MAGNITUDE)


def _host_row(values: Tensor) -> np.ndarray:
    """Return the row of a flat tensor on the host, without what is lost."""
    if values.dtype is torch.float64:
        values = values.float()
    # The upper half of fp32 is bf16, cut off: of the same exponent.
    dtype = values.dtype if values.dtype in HALF else torch.bfloat16
    wide_bits = None if values.dtype in HALF else values.view(torch.int32).numpy()
    bits = values.view(torch.int16).numpy() if wide_bits is None else (wide_bits >> 16).astype(np.int16)
    counts = pattern_counts(bits, dtype)
    starts, bins = starts_of(dtype)
    sums = np.add.reduceat(counts, starts)
    row = np.zeros(WIDTH, dtype=np.int64)
    row[bins[1:]] = sums[1:]
    row[bins[0]] += sums[0]
    if wide_bits is not None:
        _fill_in(row, wide_bits & np.int32(MAGNITUDE))
        return row
    row[ZEROS] = counts[0]
    row[SMALLEST] = NOTHING
    has = np.flatnonzero(sums[1:-1]) + 1  # neither zeros nor what is not finite
    if len(has):
        first, last = (counts[starts[at] : starts[at + 1]] for at in (has[0], has[-1]))
        ends = (starts[has[0]] + np.argmax(first != 0), starts[has[-1] + 1] - 1 - np.argmax(last[::-1] != 0))
        magnitudes = torch.from_numpy(np.array(ends, dtype=np.int16)).view(dtype).float()
        row[SMALLEST], row[LARGEST] = magnitudes.view(torch.int32).tolist()
    return row


def _fill_in(row: np.ndarray, sizes: np.ndarray) -> None:
    """Set zeros and both magnitudes of a row whose exponents are counted."""
    row[SMALLEST], row[LARGEST] = sizes.min(), sizes.max()
    if row[BINS - 1]:
        row[LARGEST] = np.where(sizes < INFINITY, sizes, 0).max()
    if row[SMALLEST] == 0:
        row[ZEROS] = len(sizes) - np.count_nonzero(sizes)
        row[SMALLEST] = int(_shifted(sizes).min()) + 1


def _device_row(values: Tensor, exact: Tensor | None) -> Tensor:
    """Return a row without a read, which would wait for the device."""
    bits = values.float().view(torch.int32)
    sizes = aten.bitwise_and.Scalar(bits, MAGNITUDE)
    row = torch.zeros(WIDTH, dtype=torch.int64, device=sizes.device)
    exponents = aten.bitwise_right_shift.Tensor_Scalar(sizes, 23).float()
    row[:BINS] = torch.histc(exponents, BINS, 0, BINS).long()  # bincount would wait
    row[ZEROS] = sizes.numel() - aten.count_nonzero(sizes)
    if exact is not None:
        row[LOST] = aten.count_nonzero(aten.logical_and(sizes == 0, exact != 0))
    # Zero becomes the largest number, so that it is never the smallest.
    row[SMALLEST] = aten.bitwise_and.Scalar(sizes - 1, MAGNITUDE).min().long() + 1
    row[LARGEST] = torch.where(sizes >= INFINITY, 0, sizes).max().long()
    return row


def added(total: np.ndarray | None, row: np.ndarray) -> np.ndarray:
    """Return the row of all elements of two; a total is changed in place, and begins as a copy."""
    if total is None:
        return row.copy()
    least, most = min(total[SMALLEST], row[SMALLEST]), max(total[LARGEST], row[LARGEST])
    total += row
    total[SMALLEST], total[LARGEST] = least, most
    return total


def widened(row: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return the row of the same values in a wider type, where none is lost."""
    copy = row.clone() if isinstance(row, Tensor) else row.copy()
    copy[LOST] = 0
    return copy


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


def pattern_counts(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return how often each magnitude occurs, (PATTERNS,) int64, by its bits.

    Args:
        bits: (elements,) int16 with the sign, of fp16 or bf16; not empty.
        dtype: which of both.
    """
    parts = (bits[begin : begin + CHUNK] & np.int16(PATTERNS - 1) for begin in range(0, len(bits), CHUNK))
    total = _counts(next(parts), dtype)
    for part in parts:
        total += _counts(part, dtype)
    return total


def _counts(sizes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the counts of magnitudes, which may be changed."""
    infinity = INFINITIES[dtype]
    sample = sizes[:SAMPLE]
    zeros = len(sample) - np.count_nonzero(sample)
    is_spread = zeros * MANY > len(sample) and sizes.max() <= infinity
    if is_spread:  # over the patterns of NaN, of which there is none
        sizes |= (sizes == 0) * _ramp(infinity)[: len(sizes)]
    counts: np.ndarray = torch.bincount(torch.from_numpy(sizes), minlength=PATTERNS).numpy()
    if is_spread:
        counts[0] = counts[infinity + 1 :].sum()
        counts[infinity + 1 :] = 0
    return counts


@cache
def _ramp(infinity: int) -> np.ndarray:
    return np.resize(np.arange(infinity + 1, PATTERNS, dtype=np.int16), CHUNK)


@cache
def starts_of(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the first pattern of each exponent of a 16-bit type, ascending, and its biased exponent in fp32.

    The first is zero alone, the last what is not finite.
    """
    fraction, bias = (10, 15) if dtype is torch.float16 else (7, 127)
    normal = range(1, 2 * bias + 1)
    starts = [*(exponent << fraction for exponent in normal), (2 * bias + 1) << fraction]
    bins = [*(exponent - bias + 127 for exponent in normal), 255]
    if bias == 127:  # subnormal numbers of bf16 are subnormal in fp32 too
        return np.array([0, 1, *starts]), np.array([0, 0, *bins])
    below = range(fraction)
    return (
        np.array([0, *(1 << power for power in below), *starts]),
        np.array([0, *(power - 24 + 127 for power in below), *bins]),
    )
