"""Plots with one line per arm, drawn without a script: an interval, a box or a bar on a scale from 0 to 100 percent."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ampcompare.results.report.document import Cell

FARTHEST = 8.0  # times the margin, beyond which a linear axis would hide it
Kind = Literal["linear", "asinh", "log"]


@dataclass(frozen=True)
class PlotScale:
    """Where a value stands, in percent of the width.

    Attributes:
        knee: of `asinh`: about where the axis turns from linear to logarithmic.
        base: of the powers that mark a logarithmic scale; 0 for round values.
    """

    low: float
    high: float
    kind: Kind = "linear"
    knee: float = 1.0
    base: int = 0

    def _value_on_scale(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value) if value > 0 else -math.inf
        return math.asinh(value / self.knee) if self.kind == "asinh" else value

    def position_of(self, value: float, *, beyond: float = 0.0) -> float:
        """Return the position of a value; those outside lie on the edge, or this share of the width beyond it."""
        start, end = self._value_on_scale(self.low), self._value_on_scale(self.high)
        return round(
            100 * min(1 + beyond, max(-beyond, (self._value_on_scale(value) - start) / (end - start))), 2
        )

    def ticks(self, most: int = 7, *, whole: bool = False) -> list[float]:
        """Return about `most` round values on it; only whole numbers if that is asked for."""
        if self.kind == "asinh":
            steps = [self.knee * 10.0**power for power in range(9)]
            inside = [value for value in steps if value <= max(abs(self.low), abs(self.high))][-2:]
            return [
                value
                for value in (*(-step for step in reversed(inside)), 0.0, *inside)
                if self._contains_value(value)
            ]
        if self.base:
            powers = range(
                math.ceil(math.log(self.low, self.base)), math.floor(math.log(self.high, self.base)) + 1
            )
            if self.base == 10 and len(powers) < 3:  # marks between them too
                near = (
                    factor * 10.0**power
                    for power in range(powers.start - 1, powers.stop)
                    for factor in (1, 2, 5)
                )
                return list(filter(self._contains_value, near))
            return [float(self.base) ** power for power in powers[:: -max(1, math.ceil(len(powers) / most))]]
        step = _round_tick_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        marks = [number * step for number in range(first, last + 1)]
        return [mark for mark in marks if not whole or round(mark, 9).is_integer()]

    def _contains_value(self, value: float) -> bool:
        return self.low <= value <= self.high


def _round_tick_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def make_plot_scale(
    values: Iterable[float],
    *,
    margin: float = 0.0,
    kind: Kind = "linear",
    base: int = 0,
    zero: bool = False,
    room: float = 0.06,
) -> PlotScale:
    """Return a scale on which these values fit.

    Args:
        margin: of differences around 0, which stays visible; a scale with far values is then linear near 0 only.
        base: as of `PlotScale`.
        zero: begin at 0.
        room: share of their range beyond the least and the largest value.
    """
    known = [value for value in values if math.isfinite(value) and (kind != "log" or value > 0)]
    if margin:
        farthest = max([*map(abs, known), 1.6 * margin])
        is_far = farthest > FARTHEST * margin
        edge = 1.15 * farthest if is_far else 1.06 * farthest
        return PlotScale(-edge, edge, "asinh" if is_far else "linear", 2 * margin)
    if zero:
        return PlotScale(0.0, 1.04 * max([*known, 1e-12]), kind)
    low, high = min(known, default=0.5), max(known, default=1.5)
    if kind == "log":
        factor = max(1.3 if base else 1.02, (high / low) ** room)
        return PlotScale(low / factor, high * factor, kind, base=base)
    more = room * (high - low) if low < high else max(0.5, 1e-9 * abs(high))  # beyond what rounding hides
    return PlotScale(low - more, high + more, kind)


@dataclass(frozen=True)
class ArmPlotLine:
    """One line of a plot; all positions are percent of the width.

    Attributes:
        index: of the arm, which gives the color.
        name: at its left.
        cells: behind the track.
        points: single measurements, each with what it is.
        box: 5, 25, 50, 75 and 95 % quantiles.
        bar: the end of a bar that begins at the left edge.
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
    mark: str = ""


@dataclass(frozen=True)
class ArmLinesPlot:
    """A plot with a line for each arm on one axis: a bar, a box, or an interval with a dot per seed.

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
    tracks: Sequence[ArmPlotLine]
    ticks: Sequence[tuple[float, str]] = ()
    band: tuple[float, float] | None = None
    zero: float | None = None
    sentence: str = ""
    mark: str = ""
