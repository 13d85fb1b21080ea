"""Plots of what arms cost: peak memory, step time, time to a quality, and quality vs. time."""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate

from ampcompare.base.formatting import MIB, format_seconds, printable_line
from ampcompare.results.analysis.conclusions.phrases import capitalize_sentence
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.columns import INVALID
from ampcompare.results.report.document import Cell, Table
from ampcompare.results.report.html.charts import (
    Band,
    Chart,
    ChartView,
    Series,
    band_over_seeds,
    band_series,
    make_curve,
    mean_point,
)
from ampcompare.results.report.html.learning_curves import common_metric_of_arms, metric_bands_by_arm_index
from ampcompare.results.report.html.runs import (
    ArmRuns,
    arms_not_drawn_text,
    arms_without_valid_times_sentence,
    round_to_digits,
)
from ampcompare.results.report.html.tracks import ArmLinesPlot, ArmPlotLine, make_plot_scale

QUARTERS = (1, 5, 10, 15, 19)  # indices of the 5, 25, 50, 75 and 95 % quantiles in a trace
NEAR_FINAL = 0.99
NO_STEP_TIMES = "No record holds the times of its steps."


def peak_memory_plot(arms: Sequence[ArmRuns]) -> ArmLinesPlot:
    """Return the highest peak of each arm in MiB."""
    peaks = {arm.index: arm.row.peak_bytes / MIB for arm in arms if arm.row.peak_bytes is not None}
    scale = make_plot_scale(peaks.values(), zero=True)

    def line_of_arm(arm: ArmRuns) -> ArmPlotLine:
        peak = peaks[arm.index]
        return ArmPlotLine(arm.index, arm.name, [Cell(f"{peak:,.1f}")], bar=scale.position_of(peak))

    return ArmLinesPlot(
        "memory",
        "Peak memory",
        "Maximum over seeds. On CUDA allocated memory; on a CPU the growth of resident memory.",
        ["arm", "MiB", "peak MiB"],
        [line_of_arm(arm) for arm in arms if arm.index in peaks],
        [(scale.position_of(tick), f"{tick:,g}") for tick in scale.ticks(5)],
        sentence="" if peaks else "No run measured its memory.",
    )


def step_time_plot(arms: Sequence[ArmRuns]) -> ArmLinesPlot:
    """Return the quantiles of step times in milliseconds."""
    times: dict[int, list[float]] = {}
    for arm in arms:
        known = [
            record.trace.step_seconds
            for record in arm.timed_runs
            if record.trace and record.trace.step_seconds
        ]
        if known:
            times[arm.index] = [
                1e3 * statistics.fmean(quantiles[index] for quantiles in known) for index in QUARTERS
            ]
    scale = make_plot_scale((value for quantiles in times.values() for value in quantiles), zero=True)

    def line_of_arm(arm: ArmRuns) -> ArmPlotLine:
        lowest, _, median, _, highest = times[arm.index]
        cells = [Cell(f"{median:.3g}"), Cell(f"{lowest:.3g} to {highest:.3g}")]
        box = [scale.position_of(value) for value in times[arm.index]]
        return ArmPlotLine(arm.index, arm.name, cells, box=box, mark=arm.why_times_do_not_count)

    return ArmLinesPlot(
        "step-times",
        "Step time",
        "After the warm-up: median; box: quartiles; whiskers: 5 to 95 %; quantiles are means over seeds.",
        ["arm", "milliseconds", "median ms", "5 to 95 %"],
        [line_of_arm(arm) for arm in arms if arm.index in times],
        [(scale.position_of(tick), f"{tick:,g}") for tick in scale.ticks(5)],
        sentence="" if times else _why_all_times_invalid(arms) or NO_STEP_TIMES,
        mark=arms_without_valid_times_sentence([arm for arm in arms if arm.records_that_ran]),
    )


def quality_over_time_charts(arms: Sequence[ArmRuns], reference: str, max_points: int) -> list[Chart]:
    """Return the metric over the time of training, and its final value against that time."""
    return [_time_to_quality_chart(arms, reference, max_points), _quality_against_time_chart(arms)]


def _why_all_times_invalid(arms: Sequence[ArmRuns]) -> str:
    """Return why a figure of times is empty if the times of all arms that ran are invalid; else ""."""
    ran = [arm for arm in arms if arm.records_that_ran]
    return arms_without_valid_times_sentence(ran) if ran and not any(arm.timed_runs for arm in ran) else ""


def _cumulative_seconds_of_epochs(record: RunRecord) -> list[float]:
    """Return the time trained up to the end of each epoch."""
    return list(accumulate(epoch.train_seconds for epoch in record.summary.epochs))


def _time_to_quality_chart(arms: Sequence[ArmRuns], reference: str, max_points: int) -> Chart:
    series: list[Series] = []
    metric = common_metric_of_arms(arms)
    target, meaning = _target_quality_and_origin_sentence(arms, reference)
    by_epoch = metric_bands_by_arm_index(arms, max_points)
    for arm in arms:
        spent = band_over_seeds(
            (make_curve(enumerate(_cumulative_seconds_of_epochs(record), 1)) for record in arm.timed_runs),
            max_points,
        )
        reached = by_epoch[arm.index]
        if len(spent.mean) == len(reached.mean):  # a value that is not finite leaves a gap in one of them
            band = Band(spent.mean, reached.mean, reached.low, reached.high)
            series += band_series(arm, band, dots=len(band.x) <= 30)
    return Chart(
        "time-to-accuracy",
        f"Time to {printable_line(metric.quality_noun)}",
        f"{capitalize_sentence(printable_line(metric.name))} over seconds of training, evaluation left out.{meaning}",
        "seconds of training",
        [
            ChartView(
                "",
                printable_line(metric.column_head),
                series,
                rules=[] if target is None else [target],
                decimals=metric.decimals,
                unit=_unit_suffix(metric),
            )
        ],
        None if target is None else _time_to_target_table(arms, target),
        sentence="" if series else _why_all_times_invalid(arms) or "No epoch was evaluated.",
        mark=arms_without_valid_times_sentence([arm for arm in arms if arm.records_that_ran]),
        whole_x=False,
    )


def _target_quality_and_origin_sentence(arms: Sequence[ArmRuns], reference: str) -> tuple[float | None, str]:
    """Return the value, as it is shown, that arms are timed to, and a sentence on where it comes from."""
    known = [arm for arm in arms if arm.row.metric_mean is not None and math.isfinite(arm.row.metric_mean)]
    chosen = next((arm for arm in known if arm.row.arm == reference), known[0] if known else None)
    if chosen is None or chosen.row.metric_mean is None:
        return None, ""
    metric = common_metric_of_arms(arms)
    share = NEAR_FINAL if metric.better == "higher" else 2 - NEAR_FINAL
    target = round_to_digits(metric.factor * share * chosen.row.metric_mean, 4)
    return (
        target,
        f" The dotted line is {target:g}{_unit_suffix(metric)}: {100 * share:g} % of what {chosen.name} ends with.",
    )


def _epochs_and_seconds_to_target(record: RunRecord, target: float) -> tuple[int, float] | None:
    """Return epochs and seconds until a run first has a value, as it is shown."""
    metric = record.metric
    for epoch, seconds in zip(record.summary.epochs, _cumulative_seconds_of_epochs(record), strict=True):
        if metric.factor * epoch.value == target or metric.is_better(metric.factor * epoch.value, target):
            return epoch.epoch + 1, seconds
    return None


def _unit_suffix(metric: Metric) -> str:
    """Return the unit of a shown value, with its space."""
    return f" {printable_line(metric.unit)}" if metric.unit else ""


def _time_to_target_table(arms: Sequence[ArmRuns], target: float) -> Table:
    rows: list[list[str | Cell]] = []
    for arm in arms:
        reached = [
            found
            for record in arm.records_that_ran
            if (found := _epochs_and_seconds_to_target(record, target)) is not None
        ]
        spent = [
            found[1]
            for record in arm.timed_runs
            if (found := _epochs_and_seconds_to_target(record, target)) is not None
        ]
        epochs = f"{statistics.fmean(epoch for epoch, _ in reached):.3g}" if reached else "-"
        sd = statistics.stdev(spent) if len(spent) > 1 else None
        seconds: str | Cell = INVALID if reached else "-"
        if spent:
            seconds = format_seconds(statistics.fmean(spent), sd)
        fault = Cell(arm.why_times_do_not_count or "-", "muted", badge=bool(arm.why_times_do_not_count))
        rows.append([arm.name, f"{len(reached)} of {len(arm.records_that_ran)}", epochs, seconds, fault])
    reach = f"runs that reach {target:g}{_unit_suffix(common_metric_of_arms(arms))}"
    return Table.from_rows(["arm", reach, "epochs", "seconds", "why times do not count"], rows)


def _why_arm_lacks_times(arm: ArmRuns) -> str:
    if not arm.completed_runs:
        return "no run was completed"
    return "a value is not finite" if arm.timed_runs else "its times are invalid"


def _quality_against_time_chart(arms: Sequence[ArmRuns]) -> Chart:
    series: list[Series] = []
    metric = common_metric_of_arms(arms)
    head = f"final {printable_line(metric.column_head)}"
    for arm in arms:
        done = [
            r.summary for r in arm.completed_runs if r.summary.metric_final is not None and r.summary.epochs
        ]
        if not done:
            continue
        timed = [
            record for record in arm.timed_runs if record.status == "completed" and record.summary.epochs
        ]
        seconds = [sum(epoch.train_seconds for epoch in record.summary.epochs) for record in timed]
        values = [
            metric.factor * summary.metric_final for summary in done if summary.metric_final is not None
        ]
        series += mean_point(arm, seconds, values)
    drawn = {one["a"] for one in series}
    return Chart(
        "pareto",
        f"{capitalize_sentence(printable_line(metric.quality_noun))} vs. time",
        f"Final {printable_line(metric.name)} and seconds of training: mean, and range over seeds."
        f"{arms_not_drawn_text(arms, drawn, _why_arm_lacks_times)}",
        "seconds of training",
        [ChartView("", head, series, decimals=metric.decimals, unit=_unit_suffix(metric))],
        sentence="" if series else _why_all_times_invalid(arms) or "No run was completed.",
        mark=arms_without_valid_times_sentence([arm for arm in arms if arm.completed_runs]),
        whole_x=False,
    )
