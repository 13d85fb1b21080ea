"""The report of several experiments, before it has a format: a line for each arm in each of them, and one over all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampcompare.base.formatting import printable
from ampcompare.runs.analysis.answer.phrases import sentence_start
from ampcompare.runs.analysis.forest import ExperimentEffect, Forest, Measure, PooledEffect
from ampcompare.runs.records.metric import Metric
from ampcompare.runs.report.columns import format_interval, metric_interval
from ampcompare.runs.report.document import Document, Figure, Section, Table, Text
from ampcompare.runs.report.html.effects import signed, tick_text
from ampcompare.runs.report.html.tracks import Scale, Track, TrackPlot, make_scale

__all__ = ["forest_document"]

VALUES = (
    *("measure", "arm", "experiment", "pairs", "experiments", "value", "low", "high", "confidence", "prediction_low"),
    *("prediction_high", "tau", "i_squared", "verdict", "left_out"),
)
MEASURES: tuple[Measure, ...] = ("accuracy", "time")


def forest_document(forest: Forest) -> Document:
    """Return the report: the answer, a table for each measure that any experiment has, and their values."""
    measured = [measure for measure in MEASURES if any(effect.measure == measure for effect in forest.effects)]
    arms = list(dict.fromkeys(effect.arm for effect in forest.effects))
    # Differences are shares of 1, times ratios, and tau of a time is that of the logarithm.
    values = [[line.model_dump().get(name) for name in VALUES] for line in (*forest.effects, *forest.pooled)]
    sections = [
        Section("headline", [Text(forest.headline)] if forest.headline else []),
        *(Section(measure, [_table(forest, measure)], _title(forest, measure)) for measure in measured),
        Section("legend", [Text([line]) for line in (_legend(forest), *forest.notes)]),
        Section("values", [Table.of_values(VALUES, values)]),
        Section("plots", [_plot(forest, measure, arms) for measure in MEASURES]),
        Section("experiments", [_experiments(forest)]),
    ]
    name = f"{len(forest.experiments)} experiments"
    return Document(
        "forest",
        sections,
        forest,
        name,
        f"{name} side by side",
        [f"reference {printable(forest.reference, 60)}", *(printable(arm, 60) for arm in arms[:6])],
        rows=[forest.reference, *arms],  # the first color is the reference's
    )


def _plot(forest: Forest, measure: Measure, arms: Sequence[str]) -> Figure:
    return Figure("tracks", lambda: _tracks(forest, measure, _title(forest, measure), arms))


def _experiments(forest: Forest) -> Table:
    rows = [
        [printable(text, 60) for text in (one.name, one.model, one.data, ", ".join(map(str, one.seeds)))]
        for one in forest.experiments
    ]
    return Table.of(["experiment", "model", "data", "seeds"], rows, caption="Experiments", prose=True)


def _heads(forest: Forest, measure: Measure) -> list[str]:
    """Return the heads of one table."""
    value = printable(forest.metric.difference_head) if measure == "accuracy" else "rel. time"
    return ["arm", "experiment", "pairs", value, "another", "tau", "I² %", "verdict"]


def _title(forest: Forest, measure: Measure) -> str:
    """Return what stands above one table."""
    return sentence_start(printable(forest.metric.quality)) if measure == "accuracy" else "Step time"


def _table(forest: Forest, measure: Measure) -> Table:
    """Return one table: per arm its experiments, then the line over all of them."""
    arms = list(dict.fromkeys(effect.arm for effect in forest.effects if effect.measure == measure))
    rows = []
    for arm in arms:
        mine = [effect for effect in forest.effects if (effect.arm, effect.measure) == (arm, measure)]
        rows += [_effect_row(effect, forest) for effect in mine]
        rows += [
            _pooled_row(pooled, forest) for pooled in forest.pooled if (pooled.arm, pooled.measure) == (arm, measure)
        ]
    return Table.of(_heads(forest, measure), rows)


def _legend(forest: Forest) -> str:
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


def _tracks(forest: Forest, measure: Measure, title: str, arms: Sequence[str]) -> TrackPlot:
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
