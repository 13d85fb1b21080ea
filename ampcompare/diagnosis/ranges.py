"""The range of a tensor as a row of counts: a histogram of exponents from the bits of fp32, in a few operations."""

import numpy as np
import torch
from torch import Tensor

from ampcompare.results.records.diagnosis import MagnitudeRange

aten = torch.ops.aten
BINS = 256  # of the biased exponent of fp32: 0 holds zeros and fp32 subnormals, 255 what is not finite
BIAS = 127
ZEROS = BINS
LOST = BINS + 1
SMALLEST = BINS + 2
LARGEST = BINS + 3
WIDTH = BINS + 4
MAGNITUDE = 0x7FFFFFFF
NOTHING = MAGNITUDE + 1  # above the bits of every magnitude
INFINITY = 0x7F800000
FP32_MANTISSA, BF16_MANTISSA, FP16_MANTISSA = 23, 7, 10  # bits behind the exponent
FP16_FIRST, FP16_BROKEN = (
    113,
    31,
)  # fp32's exponent of fp16's first normal one, and the one for what is not finite
_INFINITIES = {FP32_MANTISSA: INFINITY, BF16_MANTISSA: INFINITY >> 16, FP16_MANTISSA: 0x7C00}
FP16_SMALLEST, FP16_TOP = -24, 15
CHUNK = (
    2**18
)  # elements that are counted at once on the host: more leave its caches, and take fresh memory each time


def range_counts_of(tensor: Tensor, wide_tensor: Tensor | None = None) -> Tensor | np.ndarray:
    """Return the counts of a floating tensor, on its device; float64 is read as fp32.

    What is zero here and not in `wide_tensor` counts as lost.

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
    wide = None if wide_tensor is None else wide_tensor.detach().reshape(-1)
    if not on_host:
        return _range_counts_on_device(values, wide)
    if len(values) <= CHUNK:
        return _range_counts_on_host(values, wide)
    parts = values.split(CHUNK)
    total: np.ndarray | None = None
    for part, exact_part in zip(
        parts, [None] * len(parts) if wide is None else wide.split(CHUNK), strict=True
    ):
        total = total_with_range_counts_added(total, _range_counts_on_host(part, exact_part))
    assert total is not None
    return total


def _range_counts_on_host(values: Tensor, wide_tensor: Tensor | None) -> np.ndarray:
    """Return a row by NumPy, which counts several times as fast on the host as torch.

    16-bit values are counted by their own bits, of which there are half as many.
    """
    sizes, mantissa_bits = _magnitude_bits_of(values)
    row = np.zeros(WIDTH, dtype=np.int64)
    least, most = int(sizes.min()), int(sizes.max())
    infinity = int(_INFINITIES[mantissa_bits])
    counts = torch.bincount(torch.from_numpy(sizes >> mantissa_bits)).numpy()
    if most >= infinity:
        most = int(np.where(sizes < infinity, sizes, 0).max())
    if least == 0:
        row[ZEROS] = len(sizes) - np.count_nonzero(sizes)
        # zero becomes the largest number
        least = int((sizes - sizes.dtype.type(1)).view(f"u{sizes.itemsize}").min()) + 1
        if wide_tensor is not None:
            row[LOST] = np.count_nonzero((sizes == 0) & (wide_tensor.numpy() != 0))
    if mantissa_bits == FP16_MANTISSA:
        _set_exponent_counts_from_fp16(row, counts, sizes)
    else:
        row[: len(counts)] = counts
    is_all_zero = row[ZEROS] == len(sizes)
    row[SMALLEST] = NOTHING if is_all_zero else _fp32_bits_of(least, mantissa_bits)
    row[LARGEST] = _fp32_bits_of(most, mantissa_bits)
    return row


def _magnitude_bits_of(values: Tensor) -> tuple[np.ndarray, int]:
    """Return the bits of magnitudes as signed integers, and how many of them are the mantissa."""
    mantissa = {torch.bfloat16: BF16_MANTISSA, torch.float16: FP16_MANTISSA}.get(values.dtype)
    if mantissa is None:
        return values.float().view(torch.int32).numpy() & np.int32(MAGNITUDE), FP32_MANTISSA
    return values.view(torch.int16).numpy() & np.int16(MAGNITUDE >> 16), mantissa


def _set_exponent_counts_from_fp16(row: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> None:
    """Set the counts by exponent of fp32 from those of fp16, whose subnormal numbers are normal in fp32."""
    normal = counts[1:FP16_BROKEN]
    row[FP16_FIRST : FP16_FIRST + len(normal)] = normal
    row[BINS - 1] = counts[FP16_BROKEN:].sum()
    row[0] = row[ZEROS]
    if counts[0] > row[ZEROS]:
        tiny = sizes[(sizes > 0) & (sizes < 1 << FP16_MANTISSA)]  # in units of 2**-24
        by_power = np.bincount((tiny.astype(np.float32).view(np.int32) >> FP32_MANTISSA) - BIAS)
        row[BIAS + FP16_SMALLEST : BIAS + FP16_SMALLEST + len(by_power)] += by_power


def _fp32_bits_of(bits: int, mantissa_bits: int) -> int:
    """Return the bits in fp32 of a number, by its bits in the type with so many of mantissa."""
    if mantissa_bits == FP16_MANTISSA:
        return int(np.array(bits, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.int32))
    return bits << FP32_MANTISSA - mantissa_bits


def _range_counts_on_device(values: Tensor, wide_tensor: Tensor | None) -> Tensor:
    """Return a row without a read, which would wait for the device."""
    bits = values.float().view(torch.int32)
    sizes = aten.bitwise_and.Scalar(bits, MAGNITUDE)
    row = torch.zeros(WIDTH, dtype=torch.int64, device=sizes.device)
    exponents = aten.bitwise_right_shift.Tensor_Scalar(sizes, 23).float()
    row[:BINS] = torch.histc(exponents, BINS, 0, BINS).long()  # bincount would wait
    row[ZEROS] = sizes.numel() - aten.count_nonzero(sizes)
    if wide_tensor is not None:
        row[LOST] = aten.count_nonzero(aten.logical_and(sizes == 0, wide_tensor != 0))
    # Zero becomes the largest number, so that it is never the smallest.
    row[SMALLEST] = aten.bitwise_and.Scalar(sizes - 1, MAGNITUDE).min().long() + 1
    row[LARGEST] = torch.where(sizes >= INFINITY, 0, sizes).max().long()
    return row


def total_with_range_counts_added(total: np.ndarray | None, row: np.ndarray) -> np.ndarray:
    """Return the row of all elements of two; a total is changed in place, and begins as a copy."""
    if total is None:
        return row.copy()
    least, most = min(total[SMALLEST], row[SMALLEST]), max(total[LARGEST], row[LARGEST])
    total += row
    total[SMALLEST], total[LARGEST] = least, most
    return total


def range_counts_without_lost(row: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return the row of the same values in a wider type, where none is lost."""
    copy = row.clone() if isinstance(row, Tensor) else row.copy()
    copy[LOST] = 0
    return copy


def total_nonfinite_and_lost_of(row: np.ndarray) -> tuple[int, int, int]:
    """Return the elements of a row, those that are not finite, and those that are lost."""
    return int(row[:BINS].sum()), int(row[BINS - 1]), int(row[LOST])


def magnitude_range_of_counts(row: np.ndarray) -> MagnitudeRange:
    """Return what a row says, in plain numbers."""
    counts = row[:BINS]
    by_exponent = {
        number - BIAS: int(count) for number, count in enumerate(counts) if count and number < BINS - 1
    }
    zeros = int(row[ZEROS])
    if zeros and counts[0] == zeros:
        by_exponent.pop(-BIAS)
    elif zeros:
        by_exponent[-BIAS] -= zeros
    elements = int(counts.sum())
    has_values = int(row[LARGEST]) > 0
    return MagnitudeRange(
        elements=elements,
        zeros=zeros,
        below=sum(count for power, count in by_exponent.items() if power < FP16_SMALLEST - 1),
        lost=int(row[LOST]),
        top=by_exponent.get(FP16_TOP, 0),
        above=sum(count for power, count in by_exponent.items() if power > FP16_TOP),
        nonfinite=int(counts[BINS - 1]),
        smallest=_magnitude_from_bits(row[SMALLEST]) if has_values else None,
        largest=_magnitude_from_bits(row[LARGEST]) if has_values else None,
        exponents=by_exponent,
    )


def _magnitude_from_bits(bits: int) -> float:
    return float(np.array(bits, dtype=np.int32).view(np.float32))
