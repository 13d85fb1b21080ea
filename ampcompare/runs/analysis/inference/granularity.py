"""The granularity of a metric: the step between two neighboring values that it can have.

Figures that are printed with few digits, or that count few samples, are rounded: three seeds whose differences are all
one step show a spread of 0, which is not what is known. The step comes from the digits that were printed, and from the
values themselves where they lie on a coarser grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

from ampcompare.runs.analysis.inference.effect import FLOAT32_STEP, Effect

__all__ = ["are_multiples", "digit_step", "grid_step", "in_steps", "rounding_spread"]

COARSE = 4  # steps; a larger spread of differences says by itself what few steps cannot

FINEST = 16  # a grid this many times finer than the smallest difference of two values does not matter for a test
MAX_TICKS = 1e15  # a float has no more digits
MAX_TRIED = 10_000
WHOLE = 100  # counts over N samples are multiples of 1 / N, or of 100 / N in percent


def digit_step(value: float) -> float:
    """Return the step of the last digit of a finite number as Python prints it: 0.01 of 76.25, 1 of 76.0."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return 10.0 ** min(0, int(exponent))


def grid_step(values: Sequence[float], printed: float, chance: float = 0.5) -> float:
    """Return the largest step of which all values are multiples, up to rounding; at least the printed one.

    Tried are multiples of the printed step, and 100 / N: shares of N samples, in percent or of 1. Values that scatter
    over many steps are multiples of a larger one only by chance, and then of one that is small against their spread.

    Args:
        printed: step of the last printed digit; 0 where values are not rounded.
        chance: expected number of shares that fit any values, at which the search ends.
    """
    distinct = sorted(set(values))
    gaps = [b - a for a, b in itertools.pairwise(distinct)]
    largest = max(map(abs, distinct), default=0.0)
    error = max(printed / 2, largest * FLOAT32_STEP / 2) * (1 + 1e-6)
    gaps = [gap for gap in gaps if gap > 1.5 * error]  # others are equal up to rounding
    if not gaps:
        return printed
    return max(printed, _common_multiple(distinct, printed), _share_of_count(distinct, min(gaps), error, chance))


def _common_multiple(values: Sequence[float], printed: float) -> float:
    """Return the greatest common divisor of values that were printed with so many digits."""
    if not printed or max(map(abs, values)) / printed > MAX_TICKS:
        return 0.0
    return math.gcd(*(round(value / printed) for value in values)) * printed


def _share_of_count(values: Sequence[float], gap: float, error: float, most: float) -> float:
    """Return the largest 100 / N of which all values are multiples; 0 if there is none that matters."""
    tried, chance = 0, 0.0
    for steps in range(1, FINEST + 1):  # between the two closest values, which are off by `error` each
        first = max(1, math.ceil(WHOLE * steps / (gap + 2 * error)))
        last = math.floor(WHOLE * steps / max(gap - 2 * error, 2 * error, gap / 4))
        tried += last - first
        if tried > MAX_TRIED:
            return 0.0
        for count in range(first, last + 1):
            step = WHOLE / count
            chance += (2 * error / step) ** len(values)
            if chance > most:
                return 0.0
            if are_multiples(values, step, error):
                return step
    return 0.0


def are_multiples(values: Sequence[float], step: float, error: float | None = None) -> bool:
    """Return whether values are multiples of a step.

    Args:
        error: of each value; by default the rounding of float32.
    """
    return all(
        abs(value - step * round(value / step)) <= (abs(value) * FLOAT32_STEP if error is None else error)
        for value in values
    )


def rounding_spread(*steps: float) -> float:
    """Return the standard deviation of the rounding of a sum or difference of values with these steps."""
    return math.sqrt(sum(step**2 for step in steps) / 12)


def in_steps(effect: Effect, step: float) -> Effect:
    """Return an effect whose tests against the margin count steps, if these are not small against the spread."""
    return replace(effect, step=step) if effect.spread < COARSE * step else effect
