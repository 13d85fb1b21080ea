"""The tables of several experiments, which all formats share: a line for each arm in each of them, and one over all."""

from __future__ import annotations

from ampcompare.analysis.answer.phrases import sentence_start
from ampcompare.base.formatting import printable
from ampcompare.records.forest import ExperimentEffect, Forest, Measure, PooledEffect
from ampcompare.records.metric import Metric
from ampcompare.report.columns import format_interval, metric_interval

__all__ = ["MEASURES", "forest_legend", "forest_rows", "headers", "title"]

MEASURES: tuple[Measure, ...] = ("accuracy", "time")


def headers(forest: Forest, measure: Measure) -> list[str]:
    """Return the heads of one table."""
    value = printable(forest.metric.difference_head) if measure == "accuracy" else "rel. time"
    return ["arm", "experiment", "pairs", value, "another", "tau", "I² %", "verdict"]


def title(forest: Forest, measure: Measure) -> str:
    """Return what stands above one table."""
    return sentence_start(printable(forest.metric.quality)) if measure == "accuracy" else "Step time"


def forest_rows(forest: Forest, measure: Measure) -> list[list[str]]:
    """Return the texts of one table under `headers`: per arm its experiments, then the line over all of them."""
    arms = list(dict.fromkeys(effect.arm for effect in forest.effects if effect.measure == measure))
    rows = []
    for arm in arms:
        mine = [effect for effect in forest.effects if (effect.arm, effect.measure) == (arm, measure)]
        rows += [_effect_row(effect, forest) for effect in mine]
        rows += [
            _pooled_row(pooled, forest) for pooled in forest.pooled if (pooled.arm, pooled.measure) == (arm, measure)
        ]
    return rows


def forest_legend(forest: Forest) -> str:
    """Return what the tables show."""
    unit = f" {forest.metric.difference_unit}" if forest.metric.difference_unit else ""
    return (
        f"Against {printable(forest.reference, 60)}. An experiment's interval is that of 95 % by itself. The line "
        "'all' is the mean over experiments of equal weight, by Student's t on their differences, with the interval of "
        "the test that decided; another: prediction for one more such experiment (95 %); tau: standard deviation "
        "between experiments; I²: its share of the variance. Margins: "
        f"±{forest.margin:g}{unit} of {printable(forest.metric.name)}, ±{100 * forest.time_margin:g} % of step time."
    )


def _with_bounds(value: float | None, low: float | None, high: float | None, measure: Measure, forest: Forest) -> str:
    if value is None:
        return "-"
    if measure == "accuracy":
        return metric_interval(value, low, high, forest.metric, forest.margin)
    limits = (1 / (1 + forest.time_margin), 1.0, 1 + forest.time_margin)
    return format_interval(value, low, high, limits, decimals=3)


def _bounds(low: float | None, high: float | None, measure: Measure, forest: Forest) -> str:
    if low is None or high is None:
        return "-"
    return _with_bounds(low, low, high, measure, forest).partition(" ")[2]


def _tau(pooled: PooledEffect, metric: Metric) -> str:
    factor = metric.factor if metric.difference == "points" else 100.0
    return f"{factor * pooled.tau:.{metric.difference_decimals}f}"


def _effect_row(effect: ExperimentEffect, forest: Forest) -> list[str]:
    value = _with_bounds(effect.value, effect.low, effect.high, effect.measure, forest)
    note = f"left out: {printable(effect.left_out, 60)}" if effect.left_out else "-"
    names = [printable(effect.arm, 60), printable(effect.experiment, 60)]
    return [*names, str(effect.pairs), value, "-", "-", "-", note]


def _pooled_row(pooled: PooledEffect, forest: Forest) -> list[str]:
    measure = pooled.measure
    return [
        printable(pooled.arm, 60),
        f"all ({pooled.experiments})",
        "-",
        _with_bounds(pooled.value, pooled.low, pooled.high, measure, forest),
        _bounds(pooled.prediction_low, pooled.prediction_high, measure, forest),
        _tau(pooled, forest.metric) if measure == "accuracy" else f"{100 * pooled.tau:.1f} %",
        f"{100 * pooled.i_squared:.0f}",
        printable(pooled.verdict, 60) or "-",
    ]
