"""Check the numbers of loss scalers that a file holds."""

from __future__ import annotations

import math
from typing import Any

from ampcompare.base.errors import ConversionError

__all__ = ["parse_count", "parse_scale", "parse_step_count"]

MAX_SCALE = float(2**128 - 2**104)
"""The largest fp32 number: every scaler multiplies in fp32."""
MAX_STEPS = 2**53


def parse_scale(value: Any, where: str) -> float:
    """Return a loss scale: a positive finite fp32 number.

    Args:
        where: what it is, for the message.

    Raises:
        ConversionError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SCALE:
        raise ConversionError(
            f"{where} is {_shown(value)}, not a usable loss scale; convert a checkpoint from before that"
        )
    return float(value)


def parse_count(value: Any, where: str) -> int:
    """Return a number of steps, truncated to an integer.

    Args:
        where: what it counts, for the message.

    Raises:
        ConversionError: it is negative, not finite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value > MAX_STEPS:
        raise ConversionError(f"{where} is {_shown(value)}, not a valid step count")
    return int(value)


def parse_step_count(value: Any, where: str) -> int:
    """Return a number of steps that is stored as an integer.

    Args:
        where: what it counts, for the message.

    Raises:
        ConversionError: it is negative, too large for any run, or not an integer.
    """
    if type(value) is not int:
        raise ConversionError(f"{where} is {_shown(value)}, not a valid step count")
    return parse_count(value, where)


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"
