"""When cells ran, and the figure of their step times over that: a drift of the machine moves all arms together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timezone

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.html.charts import Chart, FigureTable, Series, View
from ampcompare.report.html.runs import ArmRuns, not_drawn, rounded

__all__ = ["drift_chart", "order_with_starts"]

MAX_CELL = 80


def order_with_starts(comparison: Comparison) -> list[str]:
    """Return the cells as they ran, each with its start (UTC) where its record has one."""
    starts = {f"{record.arm}@{record.config.recipe.seed}": _moment(record.started) for record in comparison.records}
    known = ((cell, starts.get(cell)) for cell in comparison.order)
    return [printable(cell, MAX_CELL) + (f" ({start:%Y-%m-%d %H:%M:%S})" if start else "") for cell, start in known]


def drift_chart(arms: Sequence[ArmRuns]) -> Chart:
    """Return the step times of runs and timing rounds over wall-clock time, in percent of the median of their arm."""
    points = {arm.index: sorted(point for record in arm.ran for point in _points(record)) for arm in arms}
    first = min((moment for timed in points.values() for moment, _ in timed), default=None)
    series: list[Series] = []
    rows = []
    for arm in arms:
        timed = points[arm.index]
        if first is None or not timed:
            continue
        median = statistics.median(seconds for _, seconds in timed)
        x = [rounded((moment - first) / 60) for moment, _ in timed]
        y = [rounded(100 * seconds / median) for _, seconds in timed]
        series.append({"a": arm.index, "x": x, "y": y, "dots": 1})
        rows.append([arm.name, str(len(timed)), f"{min(y):.1f}", f"{max(y):.1f}", f"{y[0]:.1f}", f"{y[-1]:.1f}"])
    since = "" if first is None else f" since {datetime.fromtimestamp(first, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    drawn = {one["a"] for one in series}
    return Chart(
        "drift",
        "Step time over wall-clock time",
        f"Medians of both halves of each run, and of timing rounds, over the minutes{since}. A drift of the machine "
        f"affects all arms alike.{not_drawn(arms, drawn, lambda arm: 'no start is recorded')}",
        "minutes",
        [View("", "% of the arm's median", series, rules=[100.0] if series else [], decimals=1, unit=" %")],
        FigureTable(["arm", "points", "lowest %", "highest %", "first %", "last %"], rows) if rows else None,
        sentence="" if series else "No record says when its run started.",
        whole_x=False,
    )


def _points(record: RunRecord) -> list[tuple[float, float]]:
    """Return when a cell was timed, in seconds since the epoch, and its median step times then."""
    points = []
    summary, readings = record.summary, record.readings
    start, wall = _moment(record.started), summary.wall_seconds or 0.0
    halves = (readings.first_half_seconds, readings.second_half_seconds) if readings else (None, None)
    if start is not None and halves[0] and halves[1]:
        points += [(start.timestamp() + wall * share, half) for share, half in zip((0.25, 0.75), halves, strict=True)]
    elif start is not None:
        points.append((start.timestamp() + wall / 2, summary.step_seconds_median))
    for timing in record.timing_rounds:
        if (moment := _moment(timing.started)) is not None:
            points.append((moment.timestamp(), timing.step_seconds_median))
    return [(moment, seconds) for moment, seconds in points if seconds]


def _moment(text: str | None) -> datetime | None:
    """Return a recorded moment; None without one, or where a record was edited and holds none."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
