"""The results of runs as input of tests: their common metric, their scores, and the resolution of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from ampcompare.analysis.inference.effect import float_spread, min_resolvable_spread
from ampcompare.base.errors import ConfigError
from ampcompare.records.metric import TOP1, Metric
from ampcompare.records.run import RunRecord

__all__ = ["has_score", "metric_of", "one_metric", "other_metric", "spread_floor", "value_of"]


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


def spread_floor(metric: Metric, samples: int, scores: Sequence[float]) -> float:
    """Return the smallest plausible spread of differences of scores.

    Args:
        samples: that were evaluated.
    """
    if metric.counts:
        return min_resolvable_spread(samples)
    return float_spread(scores if metric.difference == "points" else [1.0])
