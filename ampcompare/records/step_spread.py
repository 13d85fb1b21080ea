"""How the step times of one run spread: outliers, and the medians of its two halves. Plain numbers, for a record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Halves", "halves", "outlier_share"]

OUTLIER_MADS = 3
MIN_OUTLIER = 0.01  # of the median: what is nearer to it cannot move a verdict with a margin of 2 %
MAD_TO_SD = 1.4826  # of a normal distribution
MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, likewise


@dataclass(frozen=True)
class Halves:
    """The median step time of the first and of the second half of a run, in seconds.

    Attributes:
        error: standard error of the logarithm of their ratio, by the MAD of each half about its own median.
    """

    first: float
    second: float
    error: float


def outlier_share(seconds: Sequence[float]) -> float | None:
    """Return the share of step times that are far from the median: 3 scaled MADs, and at least a hundredth of it.

    None without step times.
    """
    if not seconds:
        return None
    median = statistics.median(seconds)
    limit = max(OUTLIER_MADS * MAD_TO_SD * _mad(seconds, median), MIN_OUTLIER * median)
    return sum(abs(value - median) > limit for value in seconds) / len(seconds)


def halves(seconds: Sequence[float]) -> Halves | None:
    """Return the medians of the first and the second half, or None where one of them has no positive one."""
    parts = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
    if not parts[0]:
        return None
    medians = [statistics.median(part) for part in parts]
    if min(medians) <= 0:
        return None
    errors = [
        MEDIAN_TO_MEAN_ERROR * MAD_TO_SD * _mad(part, median) / (median * math.sqrt(len(part)))
        for part, median in zip(parts, medians, strict=True)
    ]
    return Halves(medians[0], medians[1], math.hypot(*errors))


def _mad(values: Sequence[float], median: float) -> float:
    return statistics.median(abs(value - median) for value in values)
