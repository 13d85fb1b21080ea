"""Curves of single runs, and one curve with its range over the seeds of an arm."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Band", "Curve", "differences", "make_curve", "over_seeds", "thinned"]


@dataclass(frozen=True)
class Curve:
    """One run: finite values at rising positions."""

    x: Sequence[float]
    y: Sequence[float]

    def at(self, position: float, *, hold: bool) -> float | None:
        """Return the value at a position, held from the point before or on the line between two; None outside."""
        if not self.x or not self.x[0] <= position <= self.x[-1]:
            return None
        after = bisect_right(self.x, position)
        if hold or after == len(self.x):
            return self.y[after - 1]
        left, right = self.x[after - 1], self.x[after]
        share = (position - left) / (right - left)
        return self.y[after - 1] * (1 - share) + self.y[after] * share


@dataclass(frozen=True)
class Band:
    """An arm: mean, lowest and highest over the seeds that came as far as each position."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    @property
    def is_constant(self) -> bool:
        """Whether all seeds have one value, the same at each position."""
        return not self.has_width and len(set(self.mean)) == 1

    @property
    def has_width(self) -> bool:
        """Whether seeds differ anywhere."""
        return any(low < high for low, high in zip(self.low, self.high, strict=True))


def make_curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Return the points whose values are known and finite."""
    kept = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return Curve([x for x, _ in kept], [y for _, y in kept])


def differences(curve: Curve, reference: Curve) -> Curve:
    """Return a curve minus another, at its own positions inside the other."""
    pairs = ((x, y, reference.at(x, hold=False)) for x, y in zip(curve.x, curve.y, strict=True))
    return make_curve((x, None if other is None else y - other) for x, y, other in pairs)


def thinned(positions: Sequence[float], most: int) -> list[float]:
    """Return at most `most` positions, evenly chosen, with the first and the last."""
    if len(positions) <= most:
        return list(positions)
    last = len(positions) - 1
    return [positions[round(number * last / (most - 1))] for number in range(most)]


def over_seeds(
    curves: Iterable[Curve],
    most: int,
    *,
    hold: bool = False,
    mean: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Band:
    """Return one curve for the seeds of an arm, at the positions of the run that went furthest.

    Args:
        curves: one per seed; a run that stopped early counts as far as it went.
        most: points of the result.
        hold: values jump, as loss scales do, and are not drawn between two points.
    """
    known = [curve for curve in curves if curve.x]
    furthest = max(known, key=lambda curve: (curve.x[-1], len(curve.x)), default=Curve([], []))
    positions = thinned(furthest.x, most)
    values = [[y for curve in known if (y := curve.at(x, hold=hold)) is not None] for x in positions]
    return Band(positions, [mean(ys) for ys in values], [min(ys) for ys in values], [max(ys) for ys in values])
