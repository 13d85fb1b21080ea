"""Numbers of loss scalers as they stand in a file, which can be anything."""

from __future__ import annotations

import math
from typing import Any

from ampcompare.errors import ConversionError

__all__ = ["count", "positive"]


def positive(value: Any, where: str) -> float:
    """Return a positive finite number.

    Args:
        where: what it is, for the message.

    Raises:
        ConversionError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConversionError(
            f"{where} is {value}, with which nothing can be trained; convert a checkpoint from before that"
        )
    return float(value)


def count(value: Any, where: str) -> int:
    """Return a number of steps, cut to an integer.

    Args:
        where: what it counts, for the message.

    Raises:
        ConversionError: it is negative, not finite, or no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConversionError(f"{where} is {value}, which counts nothing")
    return int(value)
