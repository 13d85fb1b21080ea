"""The report as one HTML file that opens anywhere, offline: tables for everyone, charts where scripts may run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ampcompare.analysis.answer.headline import warnings_and_answer
from ampcompare.analysis.runs.time_validity import invalid_reason
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import columns, metric_text, table_rows, verdict_columns, verdict_rows
from ampcompare.report.html.assets import check_packages, look, page_parts, template
from ampcompare.report.html.charts import (
    Chart,
    FigureTable,
    Series,
    View,
    band_series,
    make_curve,
    over_seeds,
    stops_of,
)
from ampcompare.report.html.costs import memory_plot, step_time_plot, time_charts
from ampcompare.report.html.effects import accuracy_effects, time_effects
from ampcompare.report.html.learning_curves import NO_TRACE, learning_charts, traced
from ampcompare.report.html.runs import (
    ArmRuns,
    arm_facts,
    arms_with_runs,
    chosen_settings,
    listed,
    not_drawn,
    rounded,
    shared_environment,
    shared_settings,
    time_marks,
)
from ampcompare.report.legends import legend, overview_legend, sample_tables, verdict_legend
from ampcompare.report.other_precisions import precision_table
from ampcompare.report.overview import make_overview
from ampcompare.report.published import published_legend, published_table

__all__ = ["Html", "comparison_parts", "drift_chart", "order_with_starts"]

MAX_POINTS = 100
ALL_POINTS = 1600  # of one chart, shared by its arms, so that a page of hundreds of arms stays small
SECTIONS = (
    ("effects", "Differences"),
    ("summary", "Summary"),
    ("figures", "Curves"),
    ("costs", "Memory and time"),
    ("runs", "Runs"),
    ("settings", "Settings"),
    ("again", "Reproduce"),
)
MAX_CELL = 80


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def render(self, comparison: Comparison) -> str:
        """Return the page.

        Raises:
            BackendUnavailable: jinja2 is not installed.
        """
        check_packages()
        arms = arms_with_runs(comparison)
        most = max(12, min(MAX_POINTS, ALL_POINTS // max(1, len(arms))))
        learning = learning_charts(arms, comparison.reference, most) + _scaling_charts(arms, most)
        timing = [*time_charts(arms, comparison.reference, most), drift_chart(arms)]
        warnings, answer = warnings_and_answer(comparison)
        links = [self.logs.get(record.cell, "") for record in comparison.records]
        settings = shared_settings(comparison)
        page: str = template("report.html.j2").render(
            **comparison_parts(comparison, arms, answer, self.columns),
            warnings=[printable(line, MAX_LINE) for line in warnings],
            sections=[one for one in SECTIONS if one[0] != "effects" or len(arms) > 1],
            details=_details(comparison),
            has_effects=len(arms) > 1,
            accuracy_plot=accuracy_effects(comparison, arms),
            ratio_plot=time_effects(comparison, arms),
            verdict_headers=list(verdict_columns(comparison)),
            verdicts=[[arm or "(no name)", *cells] for arm, *cells in verdict_rows(comparison)],
            verdict_legend=verdict_legend(comparison),
            sample_tables=list(sample_tables(comparison)),
            precisions=precision_table(comparison),
            published=published_table(comparison),
            published_legend=published_legend(comparison),
            learning=learning,
            memory=memory_plot(arms),
            step_times=step_time_plot(arms),
            timing=timing,
            has_times=any(arm.timed for arm in arms),
            logs=links if any(links) else None,
            settings=settings,
            chosen=chosen_settings(comparison, settings),
            environment=shared_environment(comparison),
            arm_facts=arm_facts(comparison),
            command=printable(comparison.command, MAX_LINE),
            order=order_with_starts(comparison),
            **page_parts(
                [
                    {**look(index, row.arm), "is_reference": row.arm == comparison.reference}
                    for index, row in enumerate(comparison.arms)
                ],
                [*learning, *timing],
            ),
        )
        return page


def comparison_parts(
    comparison: Comparison, arms: list[ArmRuns], answer: Sequence[str], columns: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the page and the output of a notebook's cell have in common.

    Args:
        answer: the conclusions, the most important first.
        columns: as for `Reporter`.
    """
    title, *lead = [printable(line, MAX_LINE) for line in answer] or [_title(comparison)]
    return {
        "title": title,
        "lead": lead,
        "subtitle": _subtitle(comparison),
        "next_steps": [
            (printable(step.why, MAX_LINE), printable(step.command, MAX_LINE)) for step in comparison.next_steps
        ],
        **_overview(comparison, columns),
        "reading": [printable(line, MAX_LINE) for line in comparison.reading],
        "times_fault": _no_valid_time(arms),
        "run_headers": _run_headers(comparison.metric),
        "runs": [_run(record) for record in comparison.records],
    }


def _no_valid_time(arms: list[ArmRuns]) -> str:
    """Return why no time on the page is a result, where that is so for every arm that ran; else ""."""
    ran = [arm for arm in arms if arm.ran]
    return time_marks(ran) if ran and all(arm.time_fault for arm in ran) else ""


def _title(comparison: Comparison) -> str:
    count = len(comparison.arms)
    if count == 1:
        return f"One arm: {printable(comparison.arms[0].arm, 60)}"
    return f"{count} arms side by side"


def _what_was_trained(record: RunRecord) -> list[str]:
    config = record.config
    if config.script is not None:
        return [f"script {printable(config.script.name, 60)}"]
    recipe = config.recipe
    return [
        f"{printable(recipe.model.arch, 60)} on {printable(recipe.data.name, 60)}",
        f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}",
        f"batch {recipe.batch_size}",
    ]


def _subtitle(comparison: Comparison) -> list[str]:
    words = []
    if comparison.records:
        words += _what_was_trained(comparison.records[0])
    words.append(f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) != 1 else ''}")
    words.append(f"reference {printable(comparison.reference, 60)}")
    on_cpu = str(comparison.environment.get("device", "")).startswith("cpu")
    device = comparison.environment.get("processor" if on_cpu else "device_name")
    if device:
        words.append(f"on {printable(str(device), 60)}")
    if len(comparison.records) < len(comparison.order):
        words.append(f"{len(comparison.records)} of {len(comparison.order)} runs done")
    return words


def _overview(comparison: Comparison, asked: Sequence[str]) -> dict[str, Any]:
    """Return the one table, with the notes of rows as its last column, and the lines below it."""
    overview = make_overview(comparison, asked)
    rows = [[cell.text or "-" for cell in row] for row in overview.rows]
    headers = list(overview.columns)
    if any(overview.notes):
        rows = [[*row, "; ".join(notes) or "-"] for row, notes in zip(rows, overview.notes, strict=True)]
        headers.append("notes")
    return {
        "summary": {"headers": headers, "rows": [[arm or "(no name)", *cells] for arm, *cells in rows]},
        "legends": [*overview.facts, *overview_legend(comparison, overview.columns)],
    }


def _details(comparison: Comparison) -> dict[str, Any]:
    """Return the wide table of all that was measured."""
    names = list(columns(comparison))
    rows = [[arm or "(no name)", *cells] for arm, *cells in table_rows(comparison)]
    return {"headers": names, "rows": rows, "legend": legend(comparison)}


def _run_headers(metric: Metric) -> list[str]:
    """Return the heads of the table of runs."""
    best = "best %" if metric.unit == "%" else "best"
    of_metric = [printable(metric.head), best]
    return ["arm", "seed", "status", *of_metric, "loss", "step ms", "train s", "MiB", "loss scale", "skipped", "note"]


def _run(record: RunRecord) -> list[str]:
    """Return the line of one run under `_run_headers`."""
    metric = record.metric
    summary = record.summary
    train_seconds = sum(epoch.train_seconds for epoch in summary.epochs) if summary.epochs else None
    note = record.error or ""
    if summary.diverged_step is not None:
        note = f"step {summary.diverged_step}: {summary.divergence}"
    return [
        printable(record.arm, 60) or "(no name)",
        str(record.config.recipe.seed),
        record.status,
        metric_text(metric, summary.metric_final),
        metric_text(metric, summary.metric_best),
        _number(summary.loss_final, "{:.4g}"),
        *(
            _time(seconds, factor, record)
            for seconds, factor in ((summary.step_seconds_median, 1e3), (train_seconds, 1))
        ),
        _number(summary.peak_bytes, "{:,.1f}", 2**-20),
        _number(summary.final_loss_scale, "{:g}"),
        f"{summary.skipped_steps}/{summary.num_steps}" if summary.num_steps else "-",
        printable(note, 160) or "-",
    ]


def _time(seconds: float | None, factor: float, record: RunRecord) -> str:
    """Return a time of a run in the unit of its column; a word if the times of the run are invalid."""
    return "invalid" if seconds is not None and invalid_reason(record) else _number(seconds, "{:.3g}", factor)


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value * factor)


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


def _scaling_charts(arms: Sequence[ArmRuns], most: int) -> list[Chart]:
    """Return the loss scale and the skipped steps, each with at most `most` points per curve."""
    return [_loss_scale(arms, most), _skipped(arms, most)]


def _loss_scale(arms: Sequence[ArmRuns], most: int) -> Chart:
    series: list[Series] = []
    stops: list[Series] = []
    constant: dict[float, list[str]] = {}
    for arm in arms:
        curves = [(record, make_curve(_positive(record))) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most, hold=True, mean=statistics.geometric_mean)
        if band.x and not band.has_width and band.low[0] == max(band.high) == min(band.low):
            constant.setdefault(band.low[0], []).append(arm.name)
            continue
        series += band_series(arm, band, stairs=True)
        stops += stops_of(arm, curves)
    unscaled = [arm.name for arm in arms if arm.ran and any(r.trace and not r.trace.loss_scales for r in arm.ran)]
    words = [f"{scale:,g} in {listed(names)}" for scale, names in sorted(constant.items(), reverse=True)]
    said = f"Constant: {'; '.join(words)}." if words else ""
    none = f"Without loss scaling: {listed(unscaled)}." if unscaled else ""
    sentence = ""
    if not series:
        has_trace = any(record.trace for arm in arms for record in arm.ran)
        sentence = (
            " ".join(filter(None, (said, none))) if words else "No arm scales its loss." if has_trace else NO_TRACE
        )
    return Chart(
        "loss-scale",
        "Loss scale",
        " ".join(filter(None, ("After each step; a drop is an overflow.", said, none))),
        "step",
        [View("", "loss scale", series, stops, log="always")],
        sentence=sentence,
    )


def _positive(record: RunRecord) -> list[tuple[int, float]]:
    """Return steps and loss scales that a logarithmic axis can show."""
    pairs = zip(record.trace.steps, record.trace.loss_scales, strict=False) if record.trace else ()
    return [(step, scale) for step, scale in pairs if scale > 0]


def _skipped(arms: Sequence[ArmRuns], most: int) -> Chart:
    series: list[Series] = []
    stops: list[Series] = []
    without: list[str] = []
    for arm in arms:
        curves = [(record, traced(record, record.trace.skipped)) for record in arm.ran if record.trace]
        band = over_seeds((curve for _, curve in curves), most, hold=True)
        if band.x and not any(band.high):
            without.append(arm.name)
            continue
        series += band_series(arm, band, stairs=True)
        stops += stops_of(arm, curves)
    sentence = ""
    if not series:
        sentence = "No arm skipped a step." if without else NO_TRACE
    none = f" None were skipped in {listed(without)}." if without else ""
    return Chart(
        "skipped",
        "Skipped steps",
        f"Updates skipped for an overflow, counted up from the first step.{none}",
        "step",
        [View("", "skipped steps", series, stops, whole=True)],
        sentence=sentence,
    )
