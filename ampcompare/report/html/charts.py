"""Charts of curves and points: plain data that the script of the page draws, and tables for those who cannot see them.

A chart has one or more views, such as differences and absolute values, between which the reader switches. Series name
their arm by its index; the page gives it the arm's look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ampcompare.records.run import RunRecord
from ampcompare.report.html.curves import Band, Curve
from ampcompare.report.html.runs import ArmRuns, rounded

__all__ = ["Chart", "FigureTable", "Series", "View", "band_series", "chart_data", "point", "stops_of"]

Series = dict[str, Any]


@dataclass(frozen=True)
class FigureTable:
    """Numbers of a figure for those who cannot see it."""

    headers: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class View:
    """One way to show a chart.

    Attributes:
        name: on its switch; a chart with a single view has none.
        label: of the vertical axis.
        series: for the script: `{a: arm, x, y, lo, hi, step, dots, out}`.
        stops: crosses at the end of runs that diverged: `{a, x, y, text}`.
        rules: horizontal lines.
        log: `can` lets the reader choose a logarithmic axis; `always` is one, by powers of two.
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
    log: str = ""
    signed: bool = False
    decimals: int | None = None
    unit: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: its name in the page.
        x_label: of the horizontal axis, which all views share.
        views: the first is shown first; those without series are left out.
        sentence: shown instead of a chart that would show nothing but constants, or has no data.
        mark: why values here do not count; the chart is then marked with it.
        frontier: join the points that no other beats in both directions: on the left, and where this is better on the
            vertical axis; "" for no line.
    """

    key: str
    title: str
    caption: str
    x_label: str
    views: list[View]
    table: FigureTable | None = None
    sentence: str = ""
    mark: str = ""
    whole_x: bool = True
    frontier: Literal["", "higher", "lower"] = ""

    @property
    def is_drawn(self) -> bool:
        return not self.sentence and any(view.series for view in self.views)


def band_series(arm: ArmRuns, band: Band, *, stairs: bool = False, dots: bool = False) -> list[Series]:
    """Return the mean over seeds, and the range over them where it has a width; nothing for an empty band."""
    if not band.x:
        return []
    series: Series = {"a": arm.index, "x": [rounded(x, 7) for x in band.x], "y": [rounded(y) for y in band.mean]}
    low, high = ([rounded(y) for y in side] for side in (band.low, band.high))
    if low != high:
        series |= {"lo": low, "hi": high}
    if stairs:
        series["step"] = 1
    if dots or len(band.x) == 1:
        series["dots"] = 1
    if arm.row.diverged:
        series["out"] = 1  # it may leave the frame, which fits the others
    return [series]


def point(arm: ArmRuns, x: Sequence[float], y: Sequence[float]) -> Series:
    """Return one point at the means of two measurements of the same runs, with their ranges."""
    series: Series = {"a": arm.index, "dots": 1}
    for name, values in (("x", x), ("y", y)):
        series[name] = [rounded(sum(values) / len(values))]
        if len(values) > 1:
            series[f"{name}r"] = [rounded(min(values)), rounded(max(values))]
    return series


def stops_of(arm: ArmRuns, curves: Iterable[tuple[RunRecord, Curve]]) -> list[Series]:
    """Return a cross at the end of what can be drawn of each run that diverged."""
    ends = [(record, curve.x[-1], curve.y[-1]) for record, curve in curves if curve.x and record.status == "diverged"]
    if not ends:
        return []
    return [
        {
            "a": arm.index,
            "x": [rounded(x, 7) for _, x, _ in ends],
            "y": [rounded(y) for _, _, y in ends],
            "text": [
                f"seed {run.config.recipe.seed} diverged at step {run.summary.diverged_step}" for run, _, _ in ends
            ],
        }
    ]


def chart_data(charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the drawn charts for the script; positions on the horizontal axis that curves share are there once."""
    positions: dict[tuple[float, ...], int] = {}

    def shared(series: Series) -> Series:
        return {**series, "x": positions.setdefault(tuple(series["x"]), len(positions))}

    drawn = [
        {
            "key": chart.key,
            "x": chart.x_label,
            "whole": chart.whole_x,
            "frontier": chart.frontier,
            "views": [
                {
                    "y": view.label,
                    "series": [shared(series) for series in view.series],
                    "stops": view.stops,
                    "rules": [rounded(rule) for rule in view.rules],
                    "log": view.log,
                    "signed": view.signed,
                    "decimals": view.decimals,
                    "unit": view.unit,
                    "whole": view.whole,
                }
                for view in chart.views
                if view.series
            ],
        }
        for chart in charts
        if chart.is_drawn
    ]
    return {"charts": drawn, "positions": [list(values) for values in positions]}
