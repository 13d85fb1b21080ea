"""What trained weights lose in other precisions: differences of each arm to its own evaluation, run by run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampcompare.analysis.inference.effect import ERROR_RATE, interval, paired
from ampcompare.analysis.runs.scores import has_score, spread_floor
from ampcompare.records.evaluation import PrecisionResult, PrecisionRow
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord

__all__ = ["precision_rows"]

Evaluated = tuple[RunRecord, PrecisionResult]


def precision_rows(by_arm: Mapping[str, Sequence[RunRecord]], metric: Metric) -> list[PrecisionRow]:
    """Return a row for each arm and precision that its completed runs were evaluated in; none where none was asked for.

    The unit of replication is the run: a seed's own evaluation and that in another precision are a pair.
    """
    return [
        _row(arm, evaluated, metric)
        for arm, records in by_arm.items()
        for evaluated in _by_precision(record for record in records if record.status == "completed")
    ]


def _by_precision(records: Iterable[RunRecord]) -> Iterator[list[Evaluated]]:
    found: dict[tuple[bool, str], list[Evaluated]] = {}
    for record in records:
        for result in record.summary.in_precisions:
            found.setdefault((result.averaged, result.precision), []).append((record, result))
    return iter(found.values())


def _row(arm: str, evaluated: Sequence[Evaluated], metric: Metric) -> PrecisionRow:
    _, first = evaluated[0]
    measured = [(value, own, result) for record, result in evaluated if (value := _value(result, metric)) is not None
                and (own := _own(record, averaged=first.averaged)) is not None]  # fmt: skip
    errors = [result.error for _, result in evaluated if result.error]
    row = PrecisionRow(
        arm=arm, precision=first.precision, averaged=first.averaged, half=first.half, runs=len(measured),
        error=errors[0] if errors else "",
    )  # fmt: skip
    if not measured:
        return row
    values, owns = [value for value, *_ in measured], [own for _, own, _ in measured]
    differences = [metric.differ(value, own) for value, own in zip(values, owns, strict=True)]
    low, high = _interval(values, owns, min(result.samples for *_, result in measured), metric)
    return row.model_copy(
        update={
            "own_mean": statistics.fmean(owns),
            "metric_mean": statistics.fmean(values),
            "difference": statistics.fmean(differences),
            "low": low,
            "high": high,
            "disagreement": _mean(_disagreement(result) for *_, result in measured),
            "sample_difference": _mean(result.sample_difference for *_, result in measured),
        }
    )


def _interval(
    values: Sequence[float], owns: Sequence[float], samples: int, metric: Metric
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean difference over runs; None where there is none."""
    if not all(has_score(value, metric) for value in [*values, *owns]):
        return None, None
    here, there = ([metric.score(value) for value in side] for side in (values, owns))
    effect = paired(here, there, spread_floor(metric, samples, [*here, *there]), rounded=metric.counts)
    bounds = interval(effect, 1 - ERROR_RATE)
    if bounds is None:
        return None, None
    low, high = sorted(map(metric.difference_of, bounds))
    return low, high


def _value(result: PrecisionResult, metric: Metric) -> float | None:
    return result.values.get(metric.name)


def _own(record: RunRecord, *, averaged: bool) -> float | None:
    """Return the value of the first metric in the arm's own evaluation."""
    last = record.summary.epochs[-1] if record.summary.epochs else None
    return None if last is None else last.ema_value if averaged else last.value


def _disagreement(result: PrecisionResult) -> float | None:
    if result.differing is None or not result.answers:
        return None
    return result.differing / result.answers


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None
