"""What only pages show of a comparison: the answer as their title, figures, runs, settings."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

from ampcompare.base.formatting import format_count, printable_line
from ampcompare.results.analysis.effects.step_time import invalid_time_reason
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import MAX_LINE
from ampcompare.results.report.columns import INVALID, metric_text_without_unit, run_state_cell
from ampcompare.results.report.document import Block, Cell, Code, Facts, Figure, Section, Table, Text
from ampcompare.results.report.html.charts import (
    Band,
    Chart,
    ChartView,
    Curve,
    Series,
    band_over_seeds,
    band_series,
    divergence_marks,
    make_curve,
)
from ampcompare.results.report.html.costs import peak_memory_plot, quality_over_time_charts, step_time_plot
from ampcompare.results.report.html.effects import quality_effect_plot, time_effect_plot
from ampcompare.results.report.html.learning_curves import NO_TRACE, learning_charts, trace_curve
from ampcompare.results.report.html.runs import (
    ArmRuns,
    SharedAndDifferingFacts,
    arms_not_drawn_text,
    arms_with_runs,
    arms_without_valid_times_sentence,
    join_first_names,
    round_to_digits,
    shared_and_differing_environment,
    shared_and_differing_settings,
    shared_nondefault_settings,
)
from ampcompare.results.report.html.tracks import ArmLinesPlot

MAX_POINTS = 100
ALL_POINTS = 1200  # of one chart, shared by its arms, so that a page of hundreds of arms stays small
MOST_POINTS = 60  # of a picture in a notebook
MOST_ARMS = 24  # with pictures: a page draws as many as it likes, an output of a cell should stay small
DEFAULTS = "Settings that differ from their defaults"


class SwitchedCharts(NamedTuple):
    """Plots and charts, between whose arms a page switches.

    Attributes:
        fault: why no time is a result, and none is drawn; "" where one is.
    """

    charts: Sequence[Chart]
    plots: Sequence[ArmLinesPlot] = ()
    fault: str = ""


def page_sections(comparison: Comparison, logs: Mapping[str, str]) -> list[Section]:
    """Return the sections, each of which is made once a page shows it.

    Args:
        logs: links to the logs of runs, by their cells.
    """
    page = _PageBlocks(comparison, logs)
    number = format_count(len(comparison.records), "run")
    usage_state = "closed" if page.time_fault else "open"
    return [
        Section("differences", lambda: page.effect_blocks(quality_effect_plot)),
        Section("ratios", lambda: page.effect_blocks(time_effect_plot)),
        Section("curves", [Figure("curves", page.learning_curve_charts)], "Curves"),
        Section("costs", [Figure("costs", page.cost_charts)], "Memory and time"),
        Section("pictures", page.learning_curve_picture_blocks, "Curves"),
        Section("usage", [Figure("costs", page.memory_and_time_charts)], "Memory and time", usage_state),
        Section("runs", page.run_blocks, f"{number}, one line each"),
        Section("differing", page.differing_setting_blocks),
        Section("settings", page.settings_blocks),
        Section("machine", page.machine_blocks, "Environment"),
        Section("again", _blocks_of_commands(comparison)),
    ]


class _PageBlocks:
    """What the sections of one page show, each made where it is called.

    Attributes:
        time_fault: why no time is a result, and none is drawn; "" where one is.
    """

    def __init__(self, comparison: Comparison, logs: Mapping[str, str]) -> None:
        self._comparison, self._logs = comparison, logs
        self._arms = arms_with_runs(comparison)
        self._most = max(12, min(MAX_POINTS, ALL_POINTS // max(1, len(self._arms))))
        ran = [arm for arm in self._arms if arm.records_that_ran]
        self.time_fault = (
            arms_without_valid_times_sentence(ran)
            if ran and all(arm.why_times_do_not_count for arm in ran)
            else ""
        )

    @cached_property
    def _shared_settings(self) -> SharedAndDifferingFacts:
        return shared_and_differing_settings(self._comparison)

    def effect_blocks(self, draw: Callable[[Comparison, Sequence[ArmRuns]], ArmLinesPlot]) -> list[Block]:
        """Return the effects of the arms as a plot draws them; none of one arm."""
        if len(self._arms) < 2:
            return []
        return [Figure("tracks", lambda: draw(self._comparison, self._arms))]

    def learning_curve_charts(self) -> SwitchedCharts:
        """Return quality, loss, loss scale and skipped steps over the steps."""
        learning = learning_charts(self._arms, self._comparison.reference, self._most)
        scales = [_loss_scale_chart(self._arms, self._most), _skipped_steps_chart(self._arms, self._most)]
        return SwitchedCharts([*learning, *scales])

    def cost_charts(self) -> SwitchedCharts:
        """Return quality over time, the drift of the machine, memory and step times; without times that are none."""
        memory = peak_memory_plot(self._arms)
        if self.time_fault:
            return SwitchedCharts([], [memory], self.time_fault)
        quality = quality_over_time_charts(self._arms, self._comparison.reference, self._most)
        return SwitchedCharts(
            [*quality, step_time_drift_chart(self._arms)], [memory, step_time_plot(self._arms)]
        )

    def learning_curve_picture_blocks(self) -> list[Block]:
        """Return learning curves as pictures without scripts, for the output of a notebook."""
        charts = learning_charts(self._arms[:MOST_ARMS], self._comparison.reference, MOST_POINTS)
        made = [chart for chart in charts if chart.is_drawn]
        return [Figure("pictures", lambda: made, is_bare=True)] if made else []

    def memory_and_time_charts(self) -> SwitchedCharts:
        """Return those plots of memory and step times that have something to draw."""
        plots = (peak_memory_plot(self._arms), step_time_plot(self._arms))
        return SwitchedCharts((), [plot for plot in plots if not plot.sentence], self.time_fault)

    def run_blocks(self) -> list[Block]:
        """Return the table of all runs."""
        metric = self._comparison.metric
        heads = [
            "arm", "seed", "status", printable_line(metric.column_head), "best %" if metric.unit == "%" else "best",
            "loss", "step ms", "train s", "MiB", "loss scale", "skipped", "note",
        ]  # fmt: skip
        records = self._comparison.records
        links = [self._logs.get(record.cell, "") for record in records]
        table = Table.from_rows(heads, map(_table_cells_of_run, records), caption="Runs")
        return [replace(table, links=links if any(links) else ())]

    def differing_setting_blocks(self) -> list[Block]:
        """Return the settings in which arms differ."""
        return _blocks_of_differing_facts(self._shared_settings, "What differs between arms")

    def settings_blocks(self) -> list[Block]:
        """Return the settings that all runs share and that are no defaults."""
        rows = shared_nondefault_settings(self._comparison, self._shared_settings)
        if not rows:
            return [Text(["All settings have their defaults."])]
        return [Table.from_rows(["setting", "here", "default"], rows, caption=DEFAULTS, prose=True)]

    def machine_blocks(self) -> list[Block]:
        """Return the machine and the versions of the runs."""
        known = shared_and_differing_environment(self._comparison)
        differing = _blocks_of_differing_facts(known, "What differs")
        return [*differing, Facts([("", known.equal)], "What is equal in all runs" if differing else "")]


def _blocks_of_differing_facts(shared: SharedAndDifferingFacts, title: str) -> list[Block]:
    return [Facts([("", shared.differing)], title)] if shared.differing else []


def _blocks_of_commands(comparison: Comparison) -> list[Block]:
    if not comparison.command:
        return [Text(["These records do not say which command made them."])]
    again = "The same command resumes where it stopped; --force runs all cells again."
    return [Code(printable_line(comparison.command, MAX_LINE)), Text([again])]


def _table_cells_of_run(record: RunRecord) -> list[str | Cell]:
    """Return the line of one run."""
    metric = record.metric
    summary = record.summary
    train_seconds = sum(epoch.train_seconds for epoch in summary.epochs) if summary.epochs else None
    note = record.error or ""
    if summary.diverged_step is not None:
        note = f"step {summary.diverged_step}: {summary.divergence}"
    return [
        printable_line(record.arm, 60) or "(no name)",
        str(record.config.recipe.seed),
        run_state_cell(record.status),
        metric_text_without_unit(metric, summary.metric_final),
        metric_text_without_unit(metric, summary.metric_best),
        _number_text(summary.loss_final, "{:.4g}"),
        _time_cell(summary.step_seconds_median, 1e3, record),
        _time_cell(train_seconds, 1, record),
        _number_text(summary.peak_bytes, "{:,.1f}", 2**-20),
        _number_text(summary.final_loss_scale, "{:g}"),
        f"{summary.skipped_steps}/{summary.num_steps}" if summary.num_steps else "-",
        printable_line(note, 160) or "-",
    ]


def _time_cell(seconds: float | None, factor: float, record: RunRecord) -> str | Cell:
    """Return a time of a run in the unit of its column; a word if the times of the run are invalid."""
    return (
        INVALID
        if seconds is not None and invalid_time_reason(record)
        else _number_text(seconds, "{:.3g}", factor)
    )


def _number_text(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value * factor)


def step_time_drift_chart(arms: Sequence[ArmRuns]) -> Chart:
    """Return the step times of runs and timing rounds over wall-clock time, in percent of the median of their arm."""
    points = {}
    for arm in arms:
        points[arm.index] = sorted(
            point for record in arm.records_that_ran for point in _timing_points(record)
        )
    first = min((moment for timed in points.values() for moment, _ in timed), default=None)
    series: list[Series] = []
    rows = []
    for arm in arms:
        timed = points[arm.index]
        if first is None or not timed:
            continue
        median = statistics.median(seconds for _, seconds in timed)
        x = [round_to_digits((moment - first) / 60) for moment, _ in timed]
        y = [round_to_digits(100 * seconds / median) for _, seconds in timed]
        series.append({"a": arm.index, "x": x, "y": y, "dots": 1})
        rows.append(
            [arm.name, str(len(timed)), f"{min(y):.1f}", f"{max(y):.1f}", f"{y[0]:.1f}", f"{y[-1]:.1f}"]
        )
    since = "" if first is None else f" since {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    drawn = {one["a"] for one in series}
    return Chart(
        "drift",
        "Step time over wall-clock time",
        f"Medians of both halves of each run, and of timing rounds, over the minutes{since}. A drift of the machine "
        f"affects all arms alike.{arms_not_drawn_text(arms, drawn, lambda arm: 'no start is recorded')}",
        "minutes",
        [
            ChartView(
                "", "% of the arm's median", series, rules=[100.0] if series else [], decimals=1, unit=" %"
            )
        ],
        Table.from_rows(["arm", "points", "lowest %", "highest %", "first %", "last %"], rows)
        if rows
        else None,
        sentence="" if series else "No record says when its run started.",
        whole_x=False,
    )


def _timing_points(record: RunRecord) -> list[tuple[float, float]]:
    """Return when a cell was timed, in seconds since the epoch, and its median step times then."""
    points = []
    summary, readings = record.summary, record.readings
    start, wall = _parse_iso_time(record.started), summary.wall_seconds or 0.0
    halves = (readings.first_half_seconds, readings.second_half_seconds) if readings else (None, None)
    if start is not None and halves[0] and halves[1]:
        points += [
            (start.timestamp() + wall * share, half) for share, half in zip((0.25, 0.75), halves, strict=True)
        ]
    elif start is not None:
        points.append((start.timestamp() + wall / 2, summary.step_seconds_median))
    for timing in record.timing_rounds:
        if (moment := _parse_iso_time(timing.started)) is not None:
            points.append((moment.timestamp(), timing.step_seconds_median))
    return [(moment, seconds) for moment, seconds in points if seconds]


def _parse_iso_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _stair_curves_crosses_and_plain_values(
    arms: Sequence[ArmRuns],
    max_points: int,
    curve: Callable[[RunRecord], Curve],
    is_plain: Callable[[Band], bool],
    mean: Callable[[Sequence[float]], float] = statistics.fmean,
) -> tuple[list[Series], list[Series], dict[float, list[str]]]:
    """Return curves and crosses of values that jump; and of arms whose band is plain, the value with their names."""
    series: list[Series] = []
    stops: list[Series] = []
    plain: dict[float, list[str]] = {}
    for arm in arms:
        curves = [(record, curve(record)) for record in arm.records_that_ran if record.trace]
        band = band_over_seeds((one for _, one in curves), max_points, hold=True, mean=mean)
        if band.x and is_plain(band):
            plain.setdefault(band.low[0], []).append(arm.name)
            continue
        series += band_series(arm, band, stairs=True)
        stops += divergence_marks(arm, curves)
    return series, stops, plain


def _loss_scale_chart(arms: Sequence[ArmRuns], max_points: int) -> Chart:
    series, stops, constant = _stair_curves_crosses_and_plain_values(
        arms,
        max_points,
        lambda record: make_curve(_positive_loss_scales(record)),
        lambda band: min(band.low) == max(band.high),
        statistics.geometric_mean,
    )  # fmt: skip
    traces = {arm.name: [run.trace for run in arm.records_that_ran if run.trace] for arm in arms}
    unscaled = [name for name, seen in traces.items() if any(not trace.loss_scales for trace in seen)]
    words = [
        f"{scale:,g} in {join_first_names(names)}" for scale, names in sorted(constant.items(), reverse=True)
    ]
    said = f"Constant: {'; '.join(words)}." if words else ""
    none = f"Without loss scaling: {join_first_names(unscaled)}." if unscaled else ""
    sentence = ""
    if not series:
        if words:
            sentence = " ".join(filter(None, (said, none)))
        elif any(record.trace for arm in arms for record in arm.records_that_ran):
            sentence = "No arm scales its loss."
        else:
            sentence = NO_TRACE
    return Chart(
        "loss-scale",
        "Loss scale",
        " ".join(filter(None, ("After each step; a drop is an overflow.", said, none))),
        "step",
        [ChartView("", "loss scale", series, stops, log=2)],
        sentence=sentence,
    )


def _positive_loss_scales(record: RunRecord) -> list[tuple[int, float]]:
    """Return steps and loss scales that a logarithmic axis can show."""
    pairs = zip(record.trace.steps, record.trace.loss_scales, strict=False) if record.trace else ()
    return [(step, scale) for step, scale in pairs if scale > 0]


def _skipped_steps_chart(arms: Sequence[ArmRuns], max_points: int) -> Chart:
    series, stops, plain = _stair_curves_crosses_and_plain_values(
        arms, max_points, lambda record: trace_curve(record, record.trace.skipped if record.trace else []),
        lambda band: not any(band.high),
    )  # fmt: skip
    without = plain.get(0.0, [])
    sentence = ""
    if not series:
        sentence = "No arm skipped a step." if without else NO_TRACE
    none = f" None were skipped in {join_first_names(without)}." if without else ""
    return Chart(
        "skipped",
        "Skipped steps",
        f"Updates skipped for an overflow, counted up from the first step.{none}",
        "step",
        [ChartView("", "skipped steps", series, stops, whole=True)],
        sentence=sentence,
    )
