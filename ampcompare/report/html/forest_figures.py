"""The figures of several experiments: a forest plot for accuracy, and one for the step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampcompare.base.formatting import printable
from ampcompare.records.forest import ExperimentEffect, Forest, Measure, PooledEffect
from ampcompare.records.metric import Metric
from ampcompare.report.html.effects import signed, tick_text
from ampcompare.report.html.tracks import Scale, Track, TrackPlot, make_scale

__all__ = ["forest_plot"]


def forest_plot(forest: Forest, measure: Measure, title: str, arms: Sequence[str]) -> TrackPlot:
    """Return one plot: a line for each effect, and for each arm a strong one over all of its experiments."""
    metric = forest.metric
    edge = forest.margin if measure == "accuracy" else 1 + forest.time_margin
    edges = (-edge, edge) if measure == "accuracy" else (1 / edge, edge)
    effects = [one for one in forest.effects if one.measure == measure and one.value is not None]
    pooled = [one for one in forest.pooled if one.measure == measure]
    values = [_scaled(value, measure, metric) for line in (effects, pooled) for one in line for value in _numbers(one)]
    scale = make_scale(values, margin=edge) if measure == "accuracy" else make_scale([*values, *edges], kind="log")
    tracks = []
    for index, arm in enumerate(arms, 1):
        tracks += [_experiment(one, index, scale, metric) for one in effects if one.arm == arm]
        tracks += [_over_all(one, index, scale, metric) for one in pooled if one.arm == arm]
    return TrackPlot(
        f"forest-{measure}",
        f"{title} against {printable(forest.reference, 40)}",
        "Each experiment with its 95 % interval; bold: the mean over those that could be tested, with the interval of "
        "its test; dotted: the prediction for one more experiment. The band is the margin.",
        [
            "arm, experiment",
            printable(metric.difference_head) if measure == "accuracy" else "relative step time",
            "value (interval)",
            "verdict",
        ],
        tracks,
        [(scale.at(tick), tick_text(tick) if measure == "accuracy" else f"{tick:.3g}") for tick in scale.ticks()],
        (scale.at(edges[0]), scale.at(edges[1])),
        scale.at(0 if measure == "accuracy" else 1),
        sentence="" if tracks else "No experiment measured it.",
    )


def _numbers(one: ExperimentEffect | PooledEffect) -> Iterator[float]:
    names = ("value", "low", "high", "prediction_low", "prediction_high")
    yield from (value for name in names if isinstance(value := getattr(one, name, None), float))


def _scaled(value: float, measure: Measure, metric: Metric) -> float:
    return metric.shown_difference(value) if measure == "accuracy" else value


def _pair(
    low: float | None, high: float | None, measure: Measure, scale: Scale, metric: Metric
) -> tuple[float, float] | None:
    if low is None or high is None:
        return None
    return scale.at(_scaled(low, measure, metric)), scale.at(_scaled(high, measure, metric))


def _text(value: float, low: float | None, high: float | None, measure: Measure, metric: Metric) -> str:
    def shown(number: float) -> str:
        if measure == "time":
            return f"{number:.3f}"
        return signed(metric.shown_difference(number), metric.difference_decimals)

    return shown(value) if low is None or high is None else f"{shown(value)} ({shown(low)} to {shown(high)})"


def _experiment(one: ExperimentEffect, index: int, scale: Scale, metric: Metric) -> Track:
    value = one.value or 0.0
    return Track(
        index,
        f"{printable(one.arm, 40)}, {printable(one.experiment, 40)}",
        [
            _text(value, one.low, one.high, one.measure, metric),
            f"left out: {printable(one.left_out, 60)}" if one.left_out else "-",
        ],
        scale.at(_scaled(value, one.measure, metric)),
        _pair(one.low, one.high, one.measure, scale, metric),
    )


def _over_all(one: PooledEffect, index: int, scale: Scale, metric: Metric) -> Track:
    return Track(
        index,
        f"{printable(one.arm, 40)}, all ({one.experiments})",
        [_text(one.value, one.low, one.high, one.measure, metric), printable(one.verdict, 60) or "-"],
        scale.at(_scaled(one.value, one.measure, metric)),
        _pair(one.low, one.high, one.measure, scale, metric),
        dotted=_pair(one.prediction_low, one.prediction_high, one.measure, scale, metric),
        strong=True,
    )
