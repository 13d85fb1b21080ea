"""The plots of differences to the reference: the metric and step time, with the margin, the interval and each seed."""

from collections.abc import Callable, Mapping, Sequence

from ampcompare.base.formatting import format_decimal, printable_line
from ampcompare.results.analysis.conclusions.phrases import capitalize_sentence
from ampcompare.results.analysis.pairing.pairs import pairs_by_seed
from ampcompare.results.analysis.pairing.scores import is_score
from ampcompare.results.records.comparison import Comparison, Quantity
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import UNJUDGED, Verdict
from ampcompare.results.report.columns import effect_format, effect_text, verdict_cell
from ampcompare.results.report.document import Cell
from ampcompare.results.report.html.runs import ArmRuns, join_first_names
from ampcompare.results.report.html.tracks import ArmLinesPlot, ArmPlotLine, PlotScale, make_plot_scale

Gaps = Mapping[int, Sequence[tuple[float, int]]]  # of arms by their index: differences with their seeds


def quality_effect_plot(comparison: Comparison, arms: Sequence[ArmRuns]) -> ArmLinesPlot:
    """Return differences of the metric, in the unit that is shown, paired by seed."""
    metric, unit = comparison.metric, comparison.metric.difference_unit
    form = effect_format("quality", comparison)
    rows = [arm for arm in arms if arm.row.arm != comparison.reference]
    gaps = _seeds_and_differences_of_pairs(rows, arms, comparison, _metric_difference)
    bounds = [form.of_shown(end) for arm in rows for end in _interval_ends(arm.row.quality)]
    axis = make_plot_scale([*bounds, *_differences_without_seeds(gaps)], margin=comparison.margin)

    def gap_text(gap: float) -> str:
        return f"{format_decimal(gap, metric.difference_decimals, '+')} {unit}".rstrip().replace(
            "-", "\u2212"
        )

    tracks = [_effect_line_of_arm(arm, "quality", comparison, axis, gaps, gap_text) for arm in rows]
    levels = {f"{100 * arm.row.quality.confidence:.3g}" for arm in rows if arm.row.quality.confidence}
    confidence = f" ({join_first_names(sorted(levels))} %)" if levels else ""
    bend = " Beyond the labels next to 0 the axis is logarithmic." if axis.kind == "asinh" else ""
    better = " Left of 0 is better." if metric.better == "lower" else ""
    drawn = any(track.mean is not None for track in tracks)
    return ArmLinesPlot(
        "differences",
        f"{capitalize_sentence(printable_line(metric.quality_noun))} against "
        f"{printable_line(comparison.reference, 40)}",
        f"Difference of {printable_line(metric.name)}{_difference_unit_text(metric)}, paired by seed: a dot per seed, "
        f"a diamond at the mean, and the interval of the test that decided the verdict{confidence}. The band "
        f"is the margin of ±{comparison.margin:g}{f' {unit}' if unit else ''}.{bend}{better}",
        ["arm", printable_line(metric.difference_column_head), "\u0394 (interval)", "verdict"],
        tracks,
        [(axis.position_of(tick), _tick_text(tick)) for tick in axis.ticks()],
        (axis.position_of(form.limits[0]), axis.position_of(form.limits[-1])),
        axis.position_of(0),
        sentence="" if drawn else "There is no second arm with a run that pairs with one of the reference.",
    )


def time_effect_plot(comparison: Comparison, arms: Sequence[ArmRuns]) -> ArmLinesPlot:
    """Return ratios of step times, paired by seed; arms whose times do not count are named with the reason."""
    rows = [arm for arm in arms if arm.row.arm != comparison.reference and arm.row.time.effect is not None]
    valid = [arm for arm in rows if arm.row.time.kind not in UNJUDGED]
    gaps, edge = (
        _seeds_and_differences_of_pairs(valid, arms, comparison, _step_time_ratio),
        1 + comparison.time_margin,
    )
    bounds = [end for arm in valid for end in _interval_ends(arm.row.time)]
    axis = make_plot_scale([*bounds, 1 / edge, edge, *_differences_without_seeds(gaps)], kind="log")
    tracks = [_effect_line_of_arm(arm, "time", comparison, axis, gaps, "{:.3f}".format) for arm in valid]
    reasons: dict[str, list[str]] = {}
    for arm in rows:
        if arm not in valid:
            reasons.setdefault(printable_line(str(arm.row.time), 120), []).append(arm.name)
    return ArmLinesPlot(
        "step-time-ratios",
        f"Step time against {printable_line(comparison.reference, 40)}",
        f"Ratio of median step times, paired by seed; below 1 is faster. The band is the margin of "
        f"{100 * comparison.time_margin:g} %.",
        ["arm", "relative step time", "ratio (interval)", "verdict"],
        tracks,
        [(axis.position_of(tick), f"{tick:.3g}") for tick in axis.ticks()],
        (axis.position_of(1 / edge), axis.position_of(edge)),
        axis.position_of(1),
        sentence="" if tracks else "No step time is compared with the reference's.",
        mark="; ".join(f"{join_first_names(names)}: {reason}" for reason, names in reasons.items()),
    )


def _seeds_and_differences_of_pairs(
    rows: Sequence[ArmRuns],
    arms: Sequence[ArmRuns],
    comparison: Comparison,
    gap: Callable[[RunRecord, RunRecord], float | None],
) -> Gaps:
    """Return what each pair of an arm differs by, with its seed; without those that have no difference."""
    base = next((arm.records for arm in arms if arm.row.arm == comparison.reference), ())
    return {
        arm.index: [
            (value, pair[0].config.recipe.seed)
            for pair in pairs_by_seed(arm.records, base)
            if (value := gap(*pair)) is not None
        ]
        for arm in rows
    }


def _metric_difference(arm: RunRecord, reference: RunRecord) -> float | None:
    metric = arm.metric
    here = arm.summary.metric_final
    there = reference.summary.metric_final
    if is_score(here, metric) and is_score(there, metric):
        return metric.difference_in_shown_unit(metric.difference_from_reference(here, there))
    return None


def _step_time_ratio(arm: RunRecord, reference: RunRecord) -> float | None:
    here, there = arm.summary.step_seconds_median, reference.summary.step_seconds_median
    return here / there if here and there else None


def _differences_without_seeds(gaps: Gaps) -> list[float]:
    """Return the differences of all pairs, without their seeds."""
    return [gap for its in gaps.values() for gap, _ in its]


def _interval_ends(verdict: Verdict) -> list[float]:
    return [end for end in (verdict.low, verdict.high) if end is not None]


def _effect_line_of_arm(
    arm: ArmRuns,
    quantity: Quantity,
    comparison: Comparison,
    axis: PlotScale,
    gaps: Gaps,
    text: Callable[[float], str],
) -> ArmPlotLine:
    """Return the line of an arm: its mean, its interval as far as the axis goes, and a dot per seed."""
    verdict, form = arm.row.verdict(quantity), effect_format(quantity, comparison)
    low = axis.low if verdict.low is None else form.of_shown(verdict.low)
    high = axis.high if verdict.high is None else form.of_shown(verdict.high)
    interval = axis.position_of(low), axis.position_of(high)
    return ArmPlotLine(
        arm.index,
        arm.name,
        [Cell(effect_text(arm.row, quantity, comparison)), verdict_cell(verdict, 120)],
        None if verdict.effect is None else axis.position_of(form.of_shown(verdict.effect)),
        interval if _interval_ends(verdict) else None,
        [(axis.position_of(gap), f"seed {seed}: {text(gap)}") for gap, seed in gaps[arm.index]],
    )


def _difference_unit_text(metric: Metric) -> str:
    """Return in what differences are counted, after the name of a metric."""
    unit = metric.difference_unit
    if metric.difference != "points":
        return " in percent of the reference's"
    if unit == "pp":
        return " in percentage points"
    return f" in {unit}" if unit else ""


def _tick_text(tick: float) -> str:
    """Return a difference as it stands at an axis, without zeros at its end."""
    return "0" if tick == 0 else f"{tick:+.3g}".replace("-", "\u2212")
