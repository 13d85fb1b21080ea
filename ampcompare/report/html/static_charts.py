"""Charts of curves as pictures that need no script: the first view of each, in a frame of fixed size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.report.html.charts import Chart, Series, View
from ampcompare.report.html.tracks import make_scale

__all__ = ["HEIGHT", "WIDTH", "Line", "Picture", "make_picture"]

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 548, 12, 214
MOST_TICKS = 6


@dataclass(frozen=True)
class Line:
    """A curve: its arm, and paths or a point as SVG writes them; "" for none.

    Attributes:
        dots: positions of single values.
    """

    arm: int
    path: str = ""
    band: str = ""
    dots: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Picture:
    """A chart as it is drawn.

    Attributes:
        x_ticks: position and text; so are `y_ticks`.
        stops: position, arm and text of each cross.
    """

    key: str
    title: str
    caption: str
    mark: str
    x_label: str
    y_label: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line]
    stops: Sequence[tuple[float, float, int, str]]
    rules: Sequence[float]


class _Axis:
    """Where values stand in the frame.

    Args:
        values: that fit on it; where there are none, 0 to 1 do.
        base: of powers, which are the marks of a logarithmic axis; 0 for a linear one.
        room: leave some beyond the values.
        whole: mark whole numbers only.
    """

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        base: int = 0,
        room: bool = False,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        usable = [value for value in values if math.isfinite(value) and (not base or value > 0)]
        self._start, self._end, self._base = start, end, base
        if base:
            powers = [math.log(value, base) for value in usable] or [0.0]
            self._low, self._high = min(powers) - 0.4, max(powers) + 0.4
        elif room or not usable or min(usable) == max(usable):
            scale = make_scale(usable)
            self._low, self._high = scale.low, scale.high
        else:
            self._low, self._high = min(usable), max(usable)

    def at(self, value: float) -> float:
        """Return the position of a value; what lies outside is at most a little beyond the frame."""
        if self._base:
            value = math.log(value, self._base) if value > 0 else self._low
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + min(1.1, max(-0.1, share)) * (self._end - self._start), 1)

    def ticks(self, *, signed: bool = False) -> list[tuple[float, str]]:
        """Return positions and texts of marks."""
        if self._base:
            first, last = math.ceil(self._low), math.floor(self._high)
            every = max(1, math.ceil((last - first + 1) / MOST_TICKS))
            return [(self.at(self._base**power), _power(self._base, power)) for power in range(last, first - 1, -every)]
        values = [value for value in make_scale([self._low, self._high]).ticks(MOST_TICKS) if self._marks(value)]
        return [(self.at(value), _text(value, signed)) for value in values]

    def _marks(self, value: float) -> bool:
        slack = 1e-9 * (self._high - self._low)
        if self._whole and abs(value - round(value)) > slack:
            return False
        return self._low - slack <= value <= self._high + slack


def make_picture(chart: Chart) -> Picture:
    """Return the picture of a chart that is drawn."""
    view = next(view for view in chart.views if view.series)
    fitted = [one for one in view.series if not one.get("out")] or view.series
    across = [x for one in view.series for x in (*one["x"], *one.get("xr", ()))]
    up = [y for one in fitted for name in ("y", "lo", "hi", "yr") for y in one.get(name, ())]
    up += [*view.rules, *([0.0] if view.signed else [])]
    x = _Axis(across, LEFT, RIGHT, room=bool(chart.frontier), whole=chart.whole_x)
    y = _Axis(up, BOTTOM, TOP, base=2 if view.log == "always" else 0, room=True, whole=view.whole)
    return Picture(
        chart.key,
        chart.title,
        chart.caption,
        chart.mark,
        chart.x_label,
        view.label,
        x.ticks(),
        y.ticks(signed=view.signed),
        [_line(one, x, y) for one in view.series],
        _stops(view, x, y),
        [y.at(rule) for rule in view.rules],
    )


def _line(series: Series, x: _Axis, y: _Axis) -> Line:
    across = [x.at(value) for value in series["x"]]

    def along(values: Sequence[float]) -> list[tuple[float, float]]:
        points = list(zip(across, map(y.at, values), strict=True))
        if not series.get("step"):
            return points
        steps = [[(after[0], before[1]), after] for before, after in itertools.pairwise(points)]
        return [*points[:1], *(point for pair in steps for point in pair)]

    points = along(series["y"])
    band = ""
    if "lo" in series:
        band = f"{_path([*along(series['hi']), *reversed(along(series['lo']))])}Z"
    dots = points if series.get("dots") or len(points) == 1 else ()
    return Line(series["a"], _path(points) if len(points) > 1 else "", band, dots)


def _stops(view: View, x: _Axis, y: _Axis) -> list[tuple[float, float, int, str]]:
    found: list[Any] = [
        (x.at(across), min(BOTTOM, max(TOP, y.at(up))), stop["a"], text)
        for stop in view.stops
        for across, up, text in zip(stop["x"], stop["y"], stop["text"], strict=True)
    ]
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if at else 'M'}{across:g} {up:g}" for at, (across, up) in enumerate(points))


def _text(value: float, signed: bool) -> str:
    text = f"{round(value, 10):.4g}" if abs(value) < 1e5 else f"{value:.1e}"
    return ("+" if signed and value > 0 else "") + text.replace("-", "\u2212")


def _power(base: int, power: int) -> str:
    digits = dict(zip("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", strict=True))
    return f"{base}{''.join(digits[one] for one in str(power))}"
