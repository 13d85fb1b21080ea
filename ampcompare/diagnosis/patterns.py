"""How often a tensor has each pattern of 16 bits: one count that exponents and 16-bit magnitudes are read from."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

__all__ = ["pattern_counts", "starts_of"]

PATTERNS = 2**15  # without the sign
CHUNK = 2**18
SAMPLE = 2**12  # first elements that are looked at for zeros
MANY = 8  # a share of zeros of one in so many slows the count down: each addition waits for the one before
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


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
    infinity = INFINITY[dtype]
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
