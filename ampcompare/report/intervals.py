"""Values and their intervals, in digits that cannot contradict the verdict that follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampcompare.base.formatting import format_decimal

__all__ = ["MORE_DIGITS", "format_interval"]

MORE_DIGITS = 10


def format_interval(
    value: float,
    low: float | None,
    high: float | None,
    limits: Sequence[float],
    *,
    decimals: int = 2,
    sign: str = "",
) -> str:
    """Return `+0.09 [-0.73, +0.91]`, or the value alone where there is no interval.

    A verdict says on which side of a limit each bound lies: of 0, or of the equivalence margin. Rounding must not say
    otherwise, as "-0.50" would of a bound of -0.4996 that is inside a margin of 0.5. So a bound gets as many digits
    as that takes; from the second one more on, it may also be rounded away from the limit.

    Args:
        limits: which the verdict compares the bounds with, in the unit of the value.
        decimals: as far as no limit is near.
        sign: "+" to write it for positive numbers.
    """
    if low is None or high is None:
        return format_decimal(value, decimals, sign)
    shown = [_bound(bound, limits, decimals, sign) for bound in (low, high)]
    return f"{format_decimal(value, decimals, sign)} [{shown[0]}, {shown[1]}]"


def _bound(bound: float, limits: Sequence[float], decimals: int, sign: str) -> str:
    """Return the text of a bound that lies on the same side of all limits as the bound."""
    for more in range(MORE_DIGITS + 1):
        texts = [format_decimal(bound, decimals + more, sign)]
        if more > 1 and math.isfinite(bound):
            step = 10.0 ** -(decimals + more)
            texts += [format_decimal(float(texts[0]) + move, decimals + more, sign) for move in (step, -step)]
        for text in texts:
            if all(_side(float(text), _shown(limit)) == _side(bound, limit) for limit in limits):
                return text
    return repr(bound)


def _shown(limit: float) -> float:
    """Return a limit as sentences print it, such as `±0.5`."""
    return float(f"{limit:g}")


def _side(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)
