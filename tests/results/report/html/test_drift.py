"""Step times over wall-clock time, and the start of each cell, on the page."""

from collections.abc import Callable
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord, SystemReadings, TimingRound
from ampcompare.results.report.html.runs import ArmRuns, arms_with_runs
from ampcompare.results.report.html.sections import step_time_drift_chart

MakeRich = Callable[..., Comparison]


@pytest.fixture(scope="module")
def drifting(make_rich: MakeRich) -> Comparison:
    """Two arms of two seeds, each run a minute later and a tenth slower than the one before."""
    comparison = make_rich(["fp32", "half"], 2)
    records = [
        record.model_copy(
            update={
                "started": f"2026-03-01T12:{place:02d}:00.000+00:00",
                "summary": record.summary.model_copy(update={"step_seconds_median": 0.01 * 1.1**place}),
            }
        )
        for place, record in enumerate(comparison.records)
    ]
    order = [f"{record.arm}@{record.config.recipe.seed}" for record in records]
    return comparison.model_copy(update={"records": records, "order": [*order, "half@7"]})


def _drawn(comparison: Comparison, records: list[RunRecord]) -> list[dict[str, Any]]:
    rows = {row.arm: row for row in comparison.arms}
    return step_time_drift_chart([ArmRuns(0, rows[records[0].arm], records)]).views[0].series


def test_each_run_is_a_point_at_its_time(drifting: Comparison) -> None:
    """Points lie at the middle of a run, in minutes since the first, and in percent of the median of the arm."""
    figure = step_time_drift_chart(arms_with_runs(drifting))
    assert "since 2026-03-01 12:00:0" in figure.caption
    assert [len(trace["x"]) for trace in figure.views[0].series] == [2, 2]
    slower = [trace["y"][1] / trace["y"][0] for trace in figure.views[0].series]
    minutes = [trace["x"][1] - trace["x"][0] for trace in figure.views[0].series]
    assert slower == pytest.approx([1.1**step for step in minutes], rel=1e-3)
    assert figure.table is not None
    assert [row[0] for row in figure.table.texts] == ["fp32", "half"]


def test_halves_and_rounds_are_points(drifting: Comparison) -> None:
    """A run that recorded its halves has two points, and each timing round has one."""
    record = drifting.records[0]
    readings = SystemReadings(timed_steps=50, first_half_seconds=0.01, second_half_seconds=0.012)
    rounds = [TimingRound(number=1, started="2026-03-01T13:00:00.000+00:00", step_seconds_median=0.011)]
    (trace,) = _drawn(drifting, [record.model_copy(update={"readings": readings, "timing_rounds": rounds})])
    assert trace["y"] == pytest.approx([100 / 1.1, 120 / 1.1, 100], rel=1e-3)
    assert trace["x"][2] == pytest.approx(60, abs=1)


@pytest.mark.parametrize("text", [None, ""])
def test_without_a_start_there_is_no_point(drifting: Comparison, text: str | None) -> None:
    """A record without a moment is left out, and a figure without any says why."""
    record = drifting.records[0].model_copy(update={"started": text})
    assert _drawn(drifting, [record]) == []
    empty = drifting.model_copy(update={"records": [record]})
    figure = step_time_drift_chart(arms_with_runs(empty))
    assert (figure.is_drawn, figure.sentence) == (False, "No record says when its run started.")
