"""The results of runs as input of tests: their common metric, their scores, and the resolution of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from ampcompare.base.errors import ConfigError
from ampcompare.runs.analysis.inference.effect import float_spread, min_resolvable_spread
from ampcompare.runs.analysis.inference.granularity import are_multiples, digit_step, grid_step, rounding_spread
from ampcompare.runs.records.metric import TOP1, Metric
from ampcompare.runs.records.run import RunRecord

__all__ = [
    "has_score",
    "metric_of",
    "one_metric",
    "other_metric",
    "spread_floor",
    "step_of",
    "step_of_scores",
    "value_of",
]


def metric_of(records: Iterable[RunRecord]) -> Metric:
    """Return the metric that verdicts on these runs are about; top-1 where there are none."""
    return next((record.metric for record in records), TOP1)


def one_metric(records: Sequence[RunRecord]) -> Metric:
    """Return the metric that all of these runs are measured by.

    Raises:
        ConfigError: they are measured by several, and thus runs of several tasks.
    """
    for record in records:
        if different := other_metric(record, records[0]):
            raise ConfigError(
                f"{record.arm}, seed {record.config.recipe.seed}, is {different}: runs of another task are another "
                "comparison"
            )
    return metric_of(records)


def other_metric(record: RunRecord, other: RunRecord) -> str:
    """Return that two runs are measured by different metrics; "" if by one."""
    here, there = record.metric, other.metric
    if here.name != there.name:
        return f"measured by {here.name}, not {there.name}"
    if (here.better, here.difference) != (there.better, there.difference):
        return (
            f"measured by {here.name} with {here.better} values better, in {here.difference}, not with {there.better}, "
            f"in {there.difference}"
        )
    return ""


def has_score(value: float | None, metric: Metric) -> TypeGuard[float]:
    """Return whether a value is a number that can be compared with others."""
    return value is not None and math.isfinite(value) and math.isfinite(metric.score(value))


def value_of(record: RunRecord, name: str) -> float | None:
    """Return what a run reached in one of its metrics, by its name; None if it was not measured."""
    summary = record.summary
    return summary.metric_final if name == record.metric.name else summary.others_final.get(name)


def step_of(records: Sequence[RunRecord]) -> float:
    """Return the step between two neighboring final values of runs, as they are stored; 0 if none is known.

    That of a script is what it printed, and coarser where all values are; runs of one script print the same digits, of
    which Python may drop zeros. That of other metrics is one of so many samples, where all values are multiples of it.
    """
    metric = metric_of(records)
    runs = [(run, value) for run in records if has_score(value := run.summary.metric_final, metric)]
    values = [value for _, value in runs]
    samples = min((run.summary.epochs[-1].samples for run, _ in runs if run.summary.epochs), default=1)
    if not runs:
        return 0.0
    if metric.counts:
        return 1 / samples
    if all(run.script is None for run, _ in runs):
        return 1 / samples if samples > 1 and are_multiples(values, 1 / samples) else 0.0
    steps = [_printed_step(run, value, metric.name) for run, value in runs]
    return grid_step(values, min(filter(None, steps), default=0.0))


def _printed_step(record: RunRecord, value: float, name: str) -> float:
    """Return the step of the last digit of a value, by what the script printed, or by the value itself; 0 of 0."""
    known = record.script.printed.get(name) if record.script is not None else None
    return known if known is not None else digit_step(value) if value else 0.0


def step_of_scores(step: float, metric: Metric, values: Iterable[float]) -> float:
    """Return a step of stored values as a difference of their scores."""
    if metric.difference == "points":
        return step
    smallest = min(values, default=0.0)
    return step / smallest if smallest > 0 else 0.0


def spread_floor(metric: Metric, samples: int, scores: Sequence[float], step: float = 0.0) -> float:
    """Return the smallest plausible spread of differences of scores.

    Args:
        samples: that were evaluated.
        step: between two neighboring scores, where values are no counts.
    """
    if metric.counts:
        return min_resolvable_spread(samples)
    return math.hypot(float_spread(scores if metric.difference == "points" else [1.0]), rounding_spread(step, step))
