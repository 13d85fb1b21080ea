"""The plots of differences to the reference: the metric and step time, with the margin, the interval and each seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampcompare.base.formatting import format_decimal, printable
from ampcompare.results.analysis.conclusions.phrases import sentence_start
from ampcompare.results.analysis.pairing.pairs import pairs_by_seed
from ampcompare.results.analysis.pairing.scores import has_score
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import UNJUDGED
from ampcompare.results.report.columns import difference_interval, margin_limits, ratio_interval, verdict_cell
from ampcompare.results.report.document import Cell
from ampcompare.results.report.html.runs import ArmRuns, join_names
from ampcompare.results.report.html.tracks import Track, TrackPlot, make_scale

__all__ = ["accuracy_effects", "signed_text", "tick_text", "time_effects"]


def signed_text(value: float, decimals: int = 2) -> str:
    """Return a number with its sign, a minus that is as wide as a plus."""
    return format_decimal(value, decimals, "+").replace("-", "\u2212")


def _reference_runs(arms: Sequence[ArmRuns], reference: str) -> Sequence[RunRecord]:
    return next((arm.records for arm in arms if arm.row.arm == reference), ())


def accuracy_effects(comparison: Comparison, arms: Sequence[ArmRuns]) -> TrackPlot:
    """Return differences of the metric, in the unit that is shown, paired by seed."""
    metric, unit = comparison.metric, comparison.metric.difference_unit
    base = _reference_runs(arms, comparison.reference)
    rows = [arm for arm in arms if arm.row.arm != comparison.reference]
    points = {arm.index: [gap for pair in pairs_by_seed(arm.records, base) for gap in _gap(pair)] for arm in rows}
    bounds = {
        arm.index: [
            metric.shown_difference(value) for value in (arm.row.quality.low, arm.row.quality.high) if value is not None
        ]
        for arm in rows
    }
    values = [value for index, gaps in points.items() for value in (*(gap for gap, _ in gaps), *bounds[index])]
    scale = make_scale(values, margin=comparison.margin)
    limits = margin_limits(metric, comparison.margin)
    tracks = []
    for arm in rows:
        row = arm.row
        mean, low, high = row.quality.effect, row.quality.low, row.quality.high
        interval = (
            scale.low if low is None else metric.shown_difference(low),
            scale.high if high is None else metric.shown_difference(high),
        )
        has_interval = low is not None or high is not None
        tracks.append(
            Track(
                arm.index,
                arm.name,
                [Cell(difference_interval(row, comparison)), verdict_cell(row.quality, 120)],
                None if mean is None else scale.at(metric.shown_difference(mean)),
                (scale.at(interval[0]), scale.at(interval[1])) if has_interval else None,
                [
                    (scale.at(gap), f"seed {seed}: {signed_text(gap, metric.difference_decimals)} {unit}".rstrip())
                    for gap, seed in points[arm.index]
                ],
            )
        )
    levels = {f"{100 * arm.row.quality.confidence:.3g}" for arm in rows if arm.row.quality.confidence}
    confidence = f" ({join_names(sorted(levels))} %)" if levels else ""
    bend = " Beyond the labels next to 0 the axis is logarithmic." if scale.kind == "asinh" else ""
    drawn = any(track.mean is not None for track in tracks)
    return TrackPlot(
        "differences",
        f"{sentence_start(printable(metric.quality))} against {printable(comparison.reference, 40)}",
        f"Difference of {printable(metric.name)}{_in_units(metric)}, paired by seed: a dot per seed, a diamond at the "
        f"mean, and the interval of the test that decided the verdict{confidence}. The band is the margin of "
        f"±{comparison.margin:g}{f' {unit}' if unit else ''}.{bend}{_direction(metric)}",
        ["arm", printable(metric.difference_head), "\u0394 (interval)", "verdict"],
        tracks,
        [(scale.at(tick), tick_text(tick)) for tick in scale.ticks()],
        (scale.at(limits[0]), scale.at(limits[-1])),
        scale.at(0),
        sentence="" if drawn else "There is no second arm with a run that pairs with one of the reference.",
    )


def _gap(pair: tuple[RunRecord, RunRecord]) -> Iterator[tuple[float, int]]:
    """Yield the difference of a pair with its seed; nothing where there is none."""
    arm, reference = pair
    metric, here, there = arm.metric, arm.summary.metric_final, reference.summary.metric_final
    if has_score(here, metric) and has_score(there, metric):
        yield metric.shown_difference(metric.differ(here, there)), arm.config.recipe.seed


def _in_units(metric: Metric) -> str:
    """Return in what differences are counted, after the name of a metric."""
    unit = metric.difference_unit
    if metric.difference != "points":
        return " in percent of the reference's"
    return " in percentage points" if unit == "pp" else f" in {unit}" if unit else ""


def _direction(metric: Metric) -> str:
    return " Left of 0 is better." if metric.better == "lower" else ""


def tick_text(tick: float) -> str:
    """Return a difference as it stands at an axis, without zeros at its end."""
    short = f"{tick:.3g}"
    return "0" if tick == 0 else f"{'+' if tick > 0 else ''}{short}".replace("-", "\u2212")


def time_effects(comparison: Comparison, arms: Sequence[ArmRuns]) -> TrackPlot:
    """Return ratios of step times, paired by seed; arms whose times do not count are named with the reason."""
    base = _reference_runs(arms, comparison.reference)
    rows = [arm for arm in arms if arm.row.arm != comparison.reference and arm.row.time.effect is not None]
    valid = [arm for arm in rows if arm.row.time.kind not in UNJUDGED]
    points = {arm.index: [_ratio(pair) for pair in pairs_by_seed(arm.records, base)] for arm in valid}
    edge = 1 + comparison.time_margin
    values = [ratio for gaps in points.values() for ratio, _ in gaps if ratio]
    for arm in valid:
        values += [value for value in (arm.row.time.low, arm.row.time.high) if value]
    scale = make_scale([*values, 1 / edge, edge], kind="log")
    tracks = []
    for arm in valid:
        row, low, high = arm.row, arm.row.time.low, arm.row.time.high
        tracks.append(
            Track(
                arm.index,
                arm.name,
                [Cell(ratio_interval(row, comparison)), verdict_cell(row.time, 120)],
                scale.at(row.time.effect or 1),
                None if low is None or high is None else (scale.at(low), scale.at(high)),
                [(scale.at(gap), f"seed {seed}: {gap:.3f}") for gap, seed in points[arm.index] if gap],
            )
        )
    return TrackPlot(
        "step-time-ratios",
        f"Step time against {printable(comparison.reference, 40)}",
        f"Ratio of median step times, paired by seed; below 1 is faster. The band is the margin of "
        f"{100 * comparison.time_margin:g} %.",
        ["arm", "relative step time", "ratio (interval)", "verdict"],
        tracks,
        [(scale.at(tick), f"{tick:.3g}") for tick in scale.ticks()],
        (scale.at(1 / edge), scale.at(edge)),
        scale.at(1),
        sentence="" if tracks else "No step time is compared with the reference's.",
        mark=_untimed_text(rows),
    )


def _untimed_text(rows: Sequence[ArmRuns]) -> str:
    """Return which step times are not compared, by reason; "" if all are."""
    reasons: dict[str, list[str]] = {}
    for arm in rows:
        if arm.row.time.kind in UNJUDGED:
            reasons.setdefault(printable(str(arm.row.time), 120), []).append(arm.name)
    return "; ".join(f"{join_names(names)}: {reason}" for reason, names in reasons.items())


def _ratio(pair: tuple[RunRecord, RunRecord]) -> tuple[float, int]:
    arm, reference = pair
    here, there = arm.summary.step_seconds_median, reference.summary.step_seconds_median
    return (here / there if here and there else 0.0), arm.config.recipe.seed
