"""The results of runs as input of tests: their common metric, their scores, and the step between neighboring values.

Figures that are printed with few digits, or that count few samples, are rounded: three seeds whose differences are all
one step show a spread of 0, which is not what is known. The step comes from the digits that were printed, and from the
values themselves where they lie on a coarser grid.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TypeGuard

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.inference.effect import (
    FLOAT32_STEP,
    Effect,
    least_spread_of_accuracies,
    least_spread_of_float32,
)
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.results.records.run import RunRecord

COARSE = 4  # steps; a larger spread of differences says by itself what few steps cannot
# a grid this many times finer than the smallest difference of two values does not matter for a test
FINEST = 16
MAX_TICKS = 1e15  # a float has no more digits
MAX_TRIED = 10_000
MAX_CHANCE = 0.5  # expected number of shares that fit any values, at which the search ends
WHOLE = 100  # counts over N samples are multiples of 1 / N, or of 100 / N in percent


def metric_of_runs(records: Iterable[RunRecord]) -> Metric:
    """Return the metric that verdicts on these runs are about; top-1 where there are none."""
    return next((record.metric for record in records), TOP1)


def common_metric(records: Sequence[RunRecord]) -> Metric:
    """Return the metric that all of these runs are measured by.

    Raises:
        ConfigError: they are measured by several, and thus runs of several tasks.
    """
    for record in records:
        if different := unlike_metrics_reason(record, records[0]):
            raise ConfigError(
                f"{record.arm}, seed {record.config.recipe.seed}, is {different}: runs of another task are another "
                "comparison"
            )
    return metric_of_runs(records)


def unlike_metrics_reason(record: RunRecord, other: RunRecord) -> str:
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


def is_score(value: float | None, metric: Metric) -> TypeGuard[float]:
    """Return whether a value is a number that can be compared with others."""
    return value is not None and math.isfinite(value) and math.isfinite(metric.score(value))


def final_metric_value(record: RunRecord, name: str) -> float | None:
    """Return what a run reached in one of its metrics, by its name; None if it was not measured."""
    summary = record.summary
    return summary.metric_final if name == record.metric.name else summary.others_final.get(name)


def spacing_of_final_values(records: Sequence[RunRecord]) -> float:
    """Return the step between two neighboring final values of runs, as they are stored; 0 if none is known.

    That of a script is what it printed, and coarser where all values are; runs of one script print the same digits, of
    which Python may drop zeros. That of other metrics is one of so many samples, where all values are multiples of it.
    """
    metric = metric_of_runs(records)
    runs = [(run, value) for run in records if is_score(value := run.summary.metric_final, metric)]
    values = [value for _, value in runs]
    samples = min((run.summary.epochs[-1].samples for run, _ in runs if run.summary.epochs), default=1)
    if not runs:
        return 0.0
    if metric.is_count:
        return 1 / samples
    if all(run.script is None for run, _ in runs):
        return 1 / samples if samples > 1 and are_multiples(values, 1 / samples) else 0.0
    steps = [_printed_spacing(run, value, metric.name) for run, value in runs]
    return largest_common_spacing(values, min(filter(None, steps), default=0.0))


def _printed_spacing(record: RunRecord, value: float, name: str) -> float:
    """Return the step of the last digit of a value, by what the script printed, or by the value itself; 0 of 0."""
    known = record.script.printed.get(name) if record.script is not None else None
    if known is not None:
        return known
    return spacing_of_last_digit(value) if value else 0.0


def spacing_of_scores(step: float, metric: Metric, values: Iterable[float]) -> float:
    """Return a step of stored values as a difference of their scores."""
    if metric.difference == "points":
        return step
    smallest = min(values, default=0.0)
    return step / smallest if smallest > 0 else 0.0


def least_plausible_spread_of_scores(
    metric: Metric, samples: int, scores: Sequence[float], step: float = 0.0
) -> float:
    """Return the smallest plausible spread of differences of scores, by samples or by the step between two scores."""
    if metric.is_count:
        return least_spread_of_accuracies(samples)
    return math.hypot(
        least_spread_of_float32(scores if metric.difference == "points" else [1.0]),
        rounding_deviation_of_spacings(step, step),
    )


def spacing_of_last_digit(value: float) -> float:
    """Return the step of the last digit of a finite number as Python prints it: 0.01 of 76.25, 1 of 76.0."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return 10.0 ** min(0, int(exponent))


def largest_common_spacing(values: Sequence[float], printed_spacing: float) -> float:
    """Return the largest step of which all values are multiples, up to rounding; at least the printed one.

    Tried are multiples of the printed step, and 100 / N: shares of N samples, in percent or of 1. Values that scatter
    over many steps are multiples of a larger one only by chance, and then of one that is small against their spread.

    Args:
        printed_spacing: step of the last printed digit; 0 where values are not rounded.
    """
    distinct = sorted(set(values))
    gaps = [b - a for a, b in itertools.pairwise(distinct)]
    largest = max(map(abs, distinct), default=0.0)
    error = max(printed_spacing / 2, largest * FLOAT32_STEP / 2) * (1 + 1e-6)
    gaps = [gap for gap in gaps if gap > 1.5 * error]  # others are equal up to rounding
    if not gaps:
        return printed_spacing
    return max(
        printed_spacing,
        _greatest_common_divisor(distinct, printed_spacing),
        _spacing_of_shares(distinct, min(gaps), error),
    )


def _greatest_common_divisor(values: Sequence[float], printed_spacing: float) -> float:
    """Return the greatest common divisor of values that were printed with so many digits."""
    if not printed_spacing or max(map(abs, values)) / printed_spacing > MAX_TICKS:
        return 0.0
    return math.gcd(*(round(value / printed_spacing) for value in values)) * printed_spacing


def _spacing_of_shares(values: Sequence[float], gap: float, error: float) -> float:
    """Return the largest 100 / N of which all values are multiples; 0 if there is none that matters."""
    tried, chance = 0, 0.0
    for steps in range(1, FINEST + 1):  # between the two closest values, which are off by `error` each
        first = max(1, math.ceil(WHOLE * steps / (gap + 2 * error)))
        last = math.floor(WHOLE * steps / max(gap - 2 * error, 2 * error, gap / 4))
        tried += last - first
        if tried > MAX_TRIED:
            return 0.0
        for count in range(first, last + 1):
            step = WHOLE / count
            chance += (2 * error / step) ** len(values)
            if chance > MAX_CHANCE:
                return 0.0
            if are_multiples(values, step, error):
                return step
    return 0.0


def are_multiples(values: Sequence[float], step: float, error: float | None = None) -> bool:
    """Return whether values are multiples of a step, up to an error: by default the rounding of float32."""
    for value in values:
        tolerance = abs(value) * FLOAT32_STEP if error is None else error
        if not abs(value - step * round(value / step)) <= tolerance:  # nor of a value that is not finite
            return False
    return True


def rounding_deviation_of_spacings(*steps: float) -> float:
    """Return the standard deviation of the rounding of a sum or difference of values with these steps."""
    return math.sqrt(sum(step**2 for step in steps) / 12)


def effect_in_spacings(effect: Effect, step: float) -> Effect:
    """Return an effect whose tests against the margin count steps, if these are not small against the spread."""
    return replace(effect, step=step) if effect.spread < COARSE * step else effect
