"""Charts of curves and points: drawn once, with the values for a script that reads them out, and tables for those who
cannot see them.

A chart has one or more views, such as differences and absolute values, between which the reader switches. Series name
their arm by its index; the page gives it the arm's look.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.document import Table
from ampcompare.results.report.html.runs import ArmRuns, round_to_digits
from ampcompare.results.report.html.tracks import PlotScale, make_plot_scale

Series = dict[str, Any]


@dataclass(frozen=True)
class ChartView:
    """A view of a chart, such as absolute values or differences from the reference: its curves and vertical axis.

    Attributes:
        name: on its switch; a chart with a single view has none.
        label: of the vertical axis.
        series: `{a: arm, x, y, lo, hi, step, dots, out}`, and of a single point lists of ranges `xr`, `yr`.
        stops: crosses at the end of runs that diverged: `{a, x, y, text}`.
        rules: horizontal lines.
        log: base of the powers that mark a logarithmic axis, 2 or 10; 0 for a linear one.
        signed: values are differences: shown with a sign, with a line at 0.
        decimals: of a value in the readout; None for four significant digits.
        unit: behind it.
        whole: the axis counts.
    """

    name: str
    label: str
    series: list[Series]
    stops: list[Series] = field(default_factory=list)
    rules: list[float] = field(default_factory=list)
    log: int = 0
    signed: bool = False
    decimals: int | None = None
    unit: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of the page: curves of the arms over one horizontal axis, in one or several views.

    Attributes:
        key: its name in the page.
        x_label: of the horizontal axis, which all views share.
        views: the first is shown first; those without series are left out.
        sentence: shown instead of a chart that would show nothing but constants, or has no data.
        mark: why values here do not count; the chart is then marked with it.
    """

    key: str
    title: str
    caption: str
    x_label: str
    views: list[ChartView]
    table: Table | None = None
    sentence: str = ""
    mark: str = ""
    whole_x: bool = True

    @property
    def filled_views(self) -> list[ChartView]:
        """The views that have something to show."""
        return [] if self.sentence else [view for view in self.views if view.series]

    @property
    def is_drawn(self) -> bool:
        return bool(self.filled_views)

    @property
    def pictures(self) -> list[Picture]:
        """A picture of each view."""
        return [_draw_view(view, whole_x=self.whole_x) for view in self.filled_views]


def band_series(arm: ArmRuns, band: Band, *, stairs: bool = False, dots: bool = False) -> list[Series]:
    """Return the mean over seeds, and the range over them where it has a width; nothing for an empty band."""
    if not band.x:
        return []
    series: Series = {
        "a": arm.index,
        "x": [round_to_digits(x, 7) for x in band.x],
        "y": [round_to_digits(y) for y in band.mean],
    }
    low, high = ([round_to_digits(y) for y in side] for side in (band.low, band.high))
    if low != high:
        series |= {"lo": low, "hi": high}
    if stairs:
        series["step"] = 1
    if dots or len(band.x) == 1:
        series["dots"] = 1
    if arm.row.diverged:
        series["out"] = 1  # it may leave the frame, which fits the others
    return [series]


def mean_point(arm: ArmRuns, x: Sequence[float], y: Sequence[float]) -> list[Series]:
    """Return one point at the means of two measurements of the same runs, with their ranges; nothing without any.

    Nor where one of them is not finite, as a perplexity may be: it has no place on an axis.
    """
    if not x or not all(map(math.isfinite, (*x, *y))):
        return []
    series: Series = {"a": arm.index, "dots": 1}
    for name, values in (("x", x), ("y", y)):
        series[name] = [round_to_digits(sum(values) / len(values))]
        if len(values) > 1:
            series[f"{name}r"] = [(round_to_digits(min(values)), round_to_digits(max(values)))]
    return [series]


def divergence_marks(arm: ArmRuns, curves: Iterable[tuple[RunRecord, Curve]]) -> list[Series]:
    """Return a cross at the end of what can be drawn of each run that diverged."""
    ends = [
        (record, curve.x[-1], curve.y[-1])
        for record, curve in curves
        if curve.x and record.status == "diverged"
    ]
    if not ends:
        return []
    marks: Series = {"a": arm.index, "x": [], "y": [], "text": []}
    for run, x, y in ends:
        marks["x"].append(round_to_digits(x, 7))
        marks["y"].append(round_to_digits(y))
        seed, step = run.config.recipe.seed, run.summary.diverged_step
        marks["text"].append(f"seed {seed} diverged at step {step}")
    return [marks]


def chart_data(charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the values of charts as data for the script of the page; positions that curves share are there once."""
    positions: dict[tuple[float, ...], int] = {}

    def share_positions_of(series: Series) -> Series:
        values: Series = {name: series[name] for name in ("a", "y", "lo", "hi") if name in series}
        return {**values, "x": positions.setdefault(tuple(series["x"]), len(positions))}

    def view_as_json(view: ChartView) -> dict[str, Any]:
        series = [share_positions_of(each) for each in view.series]
        return {"series": series, "signed": view.signed, "decimals": view.decimals, "unit": view.unit}

    drawn = []
    for chart in charts:
        if chart.is_drawn:
            views = [view_as_json(view) for view in chart.filled_views]
            drawn.append({"key": chart.key, "x": chart.x_label, "views": views})
    return {"charts": drawn, "positions": [list(values) for values in positions]}


@dataclass(frozen=True)
class Curve:
    """One run: finite values at rising positions."""

    x: Sequence[float]
    y: Sequence[float]

    def value_at(self, position: float, *, hold: bool) -> float | None:
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


def make_curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Return the points whose values are known and finite."""
    kept = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return Curve([x for x, _ in kept], [y for _, y in kept])


def curve_of_differences(curve: Curve, reference: Curve) -> Curve:
    """Return a curve minus another, at its own positions inside the other."""
    others = reference.y if curve.x == reference.x else [reference.value_at(x, hold=False) for x in curve.x]
    points = zip(curve.x, curve.y, others, strict=True)
    return make_curve((x, None if other is None else y - other) for x, y, other in points)


def _evenly_chosen_indices(count: int, max_points: int) -> Sequence[int]:
    """Return the indices of at most `max_points` of so many points, evenly chosen, with the first and the last."""
    if count <= max_points:
        return range(count)
    return [round(number * (count - 1) / (max_points - 1)) for number in range(max_points)]


def band_over_seeds(
    curves: Iterable[Curve],
    max_points: int,
    *,
    hold: bool = False,
    mean: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Band:
    """Return one curve for the seeds of an arm, at the positions of the run that went furthest.

    Args:
        curves: one per seed; a run that stopped early counts as far as it went.
        max_points: points of the result.
        hold: values jump, as loss scales do, and are not drawn between two points.
    """
    known = [curve for curve in curves if curve.x]
    furthest = max(known, key=lambda curve: (curve.x[-1], len(curve.x)), default=Curve([], []))
    places = _evenly_chosen_indices(len(furthest.x), max_points)
    positions = [furthest.x[place] for place in places]
    columns: list[list[float | None]] = []
    for curve in known:
        if curve.x == furthest.x:
            columns.append([curve.y[place] for place in places])
        else:
            columns.append([curve.value_at(x, hold=hold) for x in positions])
    values = [[y for y in ys if y is not None] for ys in zip(*columns, strict=True)]
    return Band(
        positions, [mean(ys) for ys in values], [min(ys) for ys in values], [max(ys) for ys in values]
    )


WIDE, HIGH = 1000, 500  # of the frame of curves, which a page stretches to the room that it has
MOST_TICKS = 6
SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
Point = tuple[float, float]


@dataclass(frozen=True)
class _DrawnSeries:
    """A curve or a point of an arm.

    Attributes:
        line: a path in the frame, as are `band` and `dots`; "" for none.
        at: of a single point, in percent of the frame.
        ranges: lines through that point to the least and the largest values, each as x and y of both ends.
    """

    arm: int
    line: str = ""
    band: str = ""
    dots: str = ""
    at: Point | None = None
    ranges: Sequence[tuple[float, float, float, float]] = ()


@dataclass(frozen=True)
class Picture:
    """A view of a chart as it is drawn; positions are percent of the frame, from the left and from the top.

    Attributes:
        x_ends: the values at the left and the right edge.
        x_ticks: position and text of each mark; so are `y_ticks`.
        zero: position of the line of no difference; None for none.
        stops: position, arm and text of each cross.
    """

    label: str
    x_ends: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    drawn: Sequence[_DrawnSeries]
    stops: Sequence[tuple[Point, int, str]]
    rules: Sequence[float]
    zero: float | None


def _draw_view(view: ChartView, *, whole_x: bool) -> Picture:
    fitted = [one for one in view.series if not one.get("out")] or view.series
    across = [x for one in view.series for x in itertools.chain(one["x"], *one.get("xr", ()))]
    up = [y for one in fitted for name in ("y", "lo", "hi") for y in one.get(name, ())]
    up += [y for one in fitted for pair in one.get("yr", ()) for y in pair]
    up += [*view.rules, *([0.0] if view.signed else [])]
    x = make_plot_scale(across, room=0.06 * any(len(one["x"]) == 1 for one in view.series))
    y = make_plot_scale(up, kind="log" if view.log else "linear", base=view.log)
    return Picture(
        view.label,
        (x.low, x.high),
        [(x.position_of(tick), _text_at_axis_mark(tick)) for tick in x.ticks(MOST_TICKS, whole=whole_x)],
        [
            (_percent_from_top(y, tick), _text_at_axis_mark(tick, view))
            for tick in y.ticks(MOST_TICKS, whole=view.whole)
        ],
        [_draw_series(one, x, y) for one in view.series],
        [
            ((x.position_of(across), min(100.0, max(0.0, _percent_from_top(y, up)))), stop["a"], text)
            for stop in view.stops
            for across, up, text in zip(stop["x"], stop["y"], stop["text"], strict=True)
        ],
        [_percent_from_top(y, rule) for rule in view.rules],
        _percent_from_top(y, 0) if view.signed else None,
    )


def _percent_from_top(scale: PlotScale, value: float) -> float:
    """Return the position of a value in percent from the top; what lies outside is a little beyond the frame."""
    return round(100 - scale.position_of(value, beyond=0.1), 2)


def _draw_series(series: Series, x: PlotScale, y: PlotScale) -> _DrawnSeries:
    def points_along(values: Sequence[float]) -> list[Point]:
        points = [
            (x.position_of(across), _percent_from_top(y, up))
            for across, up in zip(series["x"], values, strict=True)
        ]
        return _points_with_stair_corners(points) if series.get("step") else points

    points = points_along(series["y"])
    if len(points) == 1:
        (at,) = points
        ranges = [
            (x.position_of(left), at[1], x.position_of(right), at[1]) for left, right in series.get("xr", ())
        ]
        ranges += [
            (at[0], _percent_from_top(y, low), at[0], _percent_from_top(y, high))
            for low, high in series.get("yr", ())
        ]
        return _DrawnSeries(series["a"], at=at, ranges=ranges)
    band = (
        f"{_svg_path([*points_along(series['hi']), *reversed(points_along(series['lo']))])}z"
        if "lo" in series
        else ""
    )
    # lines of no length, with round ends
    dots = f"{_svg_path(points, 'h0m')}h0" if series.get("dots") else ""
    return _DrawnSeries(series["a"], _svg_path(points), band, dots)


def _points_with_stair_corners(points: Sequence[Point]) -> list[Point]:
    """Return points with a corner between each and the next, which lies level with the first of them."""
    steps = [[(after[0], before[1]), after] for before, after in itertools.pairwise(points)]
    return [*points[:1], *(point for pair in steps for point in pair)]


def _svg_path(points: Sequence[Point], between: str = " ") -> str:
    """Return a path through points, in whole units of the frame and relative, which is a third shorter."""
    whole = [(round(WIDE * across / 100), round(HIGH * up / 100)) for across, up in points]
    moves = (f"{after[0] - before[0]} {after[1] - before[1]}" for before, after in itertools.pairwise(whole))
    return f"M{whole[0][0]} {whole[0][1]}{'l' if between == ' ' else between}{between.join(moves)}"


def _text_at_axis_mark(value: float, view: ChartView | None = None) -> str:
    """Return a mark of an axis: a power of two as such, and a difference with its sign."""
    if view is not None and view.log == 2:
        return "2" + f"{round(math.log2(value))}".translate(SUPERSCRIPT)
    text = f"{round(value, 10):.4g}" if abs(value) < 1e5 else f"{value:.1e}"
    return ("+" if view is not None and view.signed and value > 0 else "") + text.replace("-", "\u2212")
