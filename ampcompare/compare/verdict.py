"""What pairs of runs allow to say: paired differences and ratios with their t intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MIN_PAIRS", "Interval", "paired_difference", "paired_ratio"]

MIN_PAIRS = 3
NO_SPREAD = 1e-12


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval; the bounds are None where the pairs show too little of the spread."""

    estimate: float
    low: float | None
    high: float | None
    pairs: int


def paired_difference(arm: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of arm minus reference over pairs, with the paired t interval from `MIN_PAIRS` pairs on.

    Pairs that all differ by the same amount show no spread, and so no interval; counts over a small validation set do
    that by chance. The exception is a difference of 0 in every pair, which is reported as it is.

    Source: Student's t on the differences, `scipy.stats.ttest_1samp`.
    """
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < MIN_PAIRS:
        return Interval(mean, None, None, len(differences))
    if max(differences) - min(differences) <= NO_SPREAD:
        bound = 0.0 if max(map(abs, differences)) <= NO_SPREAD else None
        return Interval(mean, bound, bound, len(differences))
    from scipy.stats import ttest_1samp

    low, high = ttest_1samp(differences, 0.0).confidence_interval(confidence)
    return Interval(mean, float(low), float(high), len(differences))


def paired_ratio(arm: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the geometric mean of arm over reference over pairs, with the interval of the paired log ratios."""
    logs = paired_difference([math.log(value) for value in arm], [math.log(value) for value in reference], confidence)
    low = None if logs.low is None else math.exp(logs.low)
    high = None if logs.high is None else math.exp(logs.high)
    return Interval(math.exp(logs.estimate), low, high, logs.pairs)
