"""Plots with one line per arm, drawn without a script: an interval, a box or a bar on a scale from 0 to 100 percent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ampcompare.results.report.document import Cell

__all__ = ["Scale", "Track", "TrackPlot", "make_scale"]

FARTHEST = 8.0  # times the margin, beyond which a linear axis would hide it
Kind = Literal["linear", "asinh", "log"]


@dataclass(frozen=True)
class Scale:
    """Where a value stands, in percent of the width.

    Attributes:
        knee: of `asinh`: about where the axis turns from linear to logarithmic.
    """

    low: float
    high: float
    kind: Kind = "linear"
    knee: float = 1.0

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value)
        return math.asinh(value / self.knee) if self.kind == "asinh" else value

    def at(self, value: float) -> float:
        """Return the position of a value; those outside lie on the edge."""
        if self.kind == "log" and value <= 0:
            return 0.0
        start, end = self._bent(self.low), self._bent(self.high)
        return round(100 * min(1.0, max(0.0, (self._bent(value) - start) / (end - start))), 2)

    def ticks(self, most: int = 7) -> list[float]:
        """Return about `most` round values on it."""
        if self.kind == "asinh":
            steps = [self.knee * 10.0**power for power in range(9)]
            inside = [value for value in steps if value <= max(abs(self.low), abs(self.high))][-2:]
            wanted = [-value for value in reversed(inside)] + [0.0, *inside]
            return [value for value in wanted if self.low <= value <= self.high]
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def make_scale(values: Iterable[float], *, margin: float = 0.0, kind: Kind = "linear", zero: bool = False) -> Scale:
    """Return a scale on which these values fit.

    Args:
        margin: of differences around 0, which stays visible; a scale with far values is then linear near 0 only.
        zero: begin at 0.
    """
    known = [value for value in values if math.isfinite(value) and (kind != "log" or value > 0)]
    if margin:
        farthest = max([*map(abs, known), 1.6 * margin])
        is_far = farthest > FARTHEST * margin
        edge = 1.15 * farthest if is_far else 1.06 * farthest
        return Scale(-edge, edge, "asinh" if is_far else "linear", 2 * margin)
    if zero:
        return Scale(0.0, 1.04 * max([*known, 1e-12]), kind)
    low, high = min(known, default=0.5), max(known, default=1.5)
    if kind == "log":
        room = max(1.02, (high / low) ** 0.06)
        return Scale(low / room, high * room, kind)
    room = 0.06 * (high - low) or max(0.5, 1e-9 * abs(high))  # beyond what rounding hides
    return Scale(low - room, high + room, kind)


@dataclass(frozen=True)
class Track:
    """One line of a plot; all positions are percent of the width.

    Attributes:
        index: of the arm, which gives the color.
        name: at its left.
        cells: behind the track.
        points: single measurements, each with what it is.
        box: 5, 25, 50, 75 and 95 % quantiles.
        bar: the end of a bar that begins at the left edge.
        dotted: a second interval, such as that of a prediction.
        strong: the line is a mean over others.
        mark: why the values do not count.
    """

    index: int
    name: str
    cells: Sequence[Cell]
    mean: float | None = None
    interval: tuple[float, float] | None = None
    points: Sequence[tuple[float, str]] = ()
    box: Sequence[float] = ()
    bar: float | None = None
    dotted: tuple[float, float] | None = None
    strong: bool = False
    mark: str = ""


@dataclass(frozen=True)
class TrackPlot:
    """A plot.

    Attributes:
        headers: of the arm, of the track, and of the cells behind it.
        ticks: position and text of each mark on the axis.
        band: the margin.
        zero: where there is no difference.
        sentence: shown instead of a plot without data.
        mark: why values here do not count.
    """

    key: str
    title: str
    caption: str
    headers: Sequence[str]
    tracks: Sequence[Track]
    ticks: Sequence[tuple[float, str]] = ()
    band: tuple[float, float] | None = None
    zero: float | None = None
    sentence: str = ""
    mark: str = ""
