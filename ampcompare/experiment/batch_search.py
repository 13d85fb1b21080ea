"""Find the largest number for which a test passes, with few tests: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_passing"]


def largest_passing(passes: Callable[[int], bool], start: int, *, multiple: int = 1, precision: float = 1 / 16) -> int:
    """Return the largest multiple that passes, or one that is smaller by at most `precision` of it; 0 if none does.

    Every number is tested once at most. What passes at a number must pass at every smaller one.

    Args:
        start: first number; doubled while it passes, else halved.
        multiple: numbers are multiples of it.
        precision: relative distance between what passes and what does not at which the search ends.
    """
    first = max(1, start // multiple)
    low, high = 0, 0  # in multiples; `high` is 0 while nothing has failed
    at = first
    while at and not high:
        if passes(at * multiple):
            low, at = at, 2 * at
        else:
            high = at
    while high and not low and (at := high // 2):
        if passes(at * multiple):
            low = at
        else:
            high = at
    while low and high - low > max(1, low * precision):
        middle = (low + high) // 2
        if passes(middle * multiple):
            low = middle
        else:
            high = middle
    return low * multiple
