"""The difference between two arms of a table, from runs, or from means with a standard deviation and a count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampcompare.analysis.inference.effect import MIN_PAIRS, SPREAD_IS_KNOWN, Effect, paired
from ampcompare.analysis.inference.granularity import grid_step, in_steps, rounding_spread
from ampcompare.analysis.tables.csv_table import Run
from ampcompare.analysis.tables.quantities import Quantity

__all__ = ["Difference", "combined", "compare_runs", "mean_and_sd"]

CONTRADICTION = 0.01  # chance of a spread as large as that of the runs if the given one is true
Line = tuple[Run, Quantity]


@dataclass(frozen=True)
class Difference:
    """An effect and how it came about.

    Attributes:
        effect: None where the table does not say how many runs are behind a mean.
        note: what a reader should know about it, "" for nothing.
        uses_sd: whether its error comes from the standard deviation that the caller gave.
        own_sd: the standard deviation of the runs where it contradicts the one that the caller gave; else None.
        rounded: whether its error is that of the rounding of the printed numbers, which more runs do not reduce.
    """

    effect: Effect | None
    note: str = ""
    uses_sd: bool = False
    own_sd: float | None = None
    rounded: bool = False


@dataclass(frozen=True)
class _Sample:
    """All runs of an arm: their mean and number, and the variance that the `known` of them show."""

    mean: float
    count: int
    variance: float
    known: int
    rounding: float  # variance of the rounding error of a number
    single: bool  # whether each number is that of one run, which has this error of its own


def compare_runs(
    arm: Sequence[Run],
    reference: Sequence[Run],
    value: Callable[[Run], Quantity | None],
    floor: float,
    sd: float | None = None,
    *,
    counted: bool = False,
) -> Difference | None:
    """Compare two arms: by pairs where most of the runs of both have a seed in common, else by Welch's test.

    Values of single runs are rounded to the digits that are printed, or to a coarser step of which all are multiples.
    The spread of that rounding is added to the one they show: three equal differences do not have a spread of 0.

    A rounded mean is off by the same amount however many runs are behind it, if they agree to the last digit. So the
    standard error is at least that of rounding the two sides: the step of the last digit over the square root of 12.

    Args:
        value: of a line, larger where it is better.
        floor: smallest spread of a difference, above 0.
        sd: standard deviation over seeds that is known from elsewhere, used if a side has fewer than three runs.
        counted: whether values may count samples, so that they lie on a coarser grid than the printed one.

    Returns:
        None if a side was not measured.
    """
    here, there = _lines(arm, value), _lines(reference, value)
    if not here or not there:
        return None
    pairs = _pairs(here, there)
    if any(run.runs is None for run, _ in (*here, *there)):
        return Difference(None)
    step = _common_step(here, there) if counted else 0.0
    samples = _sample(here, step), _sample(there, step)
    rounding = rounding_spread(_usual_step(here), _usual_step(there))
    if sd is not None and min(sample.count for sample in samples) < MIN_PAIRS:
        if not _contradicts(samples, sd):
            return _rounded(Difference(_with_known_sd(samples, sd), uses_sd=True), rounding)
        own_sd = _own_sd(samples)
    else:
        own_sd = None
    if 2 * len(pairs) > max(len(here), len(there)):
        left = len(here) + len(there) - 2 * len(pairs)
        least = max(floor, math.sqrt(sum(sample.rounding for sample in samples)))
        effect = in_steps(paired([a for a, _ in pairs], [b for _, b in pairs], least, rounded=True), step)
        note = f"is paired by seed; runs left out without a partner: {left}" if left else ""
        return _rounded(Difference(effect, note, own_sd=own_sd), rounding)
    common = f"only {len(pairs)} seed{'s are' if len(pairs) > 1 else ' is'} in common"
    note = f"is compared by Welch's test, for {common}" if pairs else ""
    return _rounded(Difference(_welch(*samples, floor), note, own_sd=own_sd), rounding)


def mean_and_sd(runs: Sequence[Run], value: Callable[[Run], Quantity | None]) -> tuple[float, float | None] | None:
    """Return the mean of an arm and the standard deviation over its runs, None where it shows none."""
    lines = _lines(runs, value)
    if not lines:
        return None
    sample = _sample(lines)
    return sample.mean, math.sqrt(sample.variance) if sample.known > 1 else _only_sd(lines)


def _only_sd(lines: Sequence[Line]) -> float | None:
    """Return the standard deviation of a single line whose number of runs is unknown."""
    return lines[0][1].sd


def combined(parts: Sequence[Difference]) -> Difference | None:
    """Return the mean difference over blocks of runs that share a setting.

    Where every block can be tested by itself, the mean has the error of its parts: it is about these settings. Where
    one cannot, such as with one run of each arm in a block, the blocks are the pairs.
    """
    known = [(part, part.effect) for part in parts if part.effect is not None]
    if len(known) < 2:
        return known[0][0] if known else None
    effects = [effect for _, effect in known]
    uses_sd, rounded = any(part.uses_sd for part, _ in known), any(part.rounded for part, _ in known)
    if not all(effect.testable for effect in effects):
        least = min(effect.error for effect in effects)
        return Difference(paired([effect.mean for effect in effects], [0.0] * len(effects), least), "", uses_sd)
    count = len(effects)
    shares = [effect.error**2 / count**2 for effect in effects]
    freedom = sum(shares) ** 2 / sum(share**2 / effect.freedom for share, effect in zip(shares, effects, strict=True))
    whole = Effect(
        mean=statistics.fmean(effect.mean for effect in effects),
        spread=math.sqrt(statistics.fmean(effect.spread**2 for effect in effects)),
        error=math.sqrt(sum(shares)),
        freedom=freedom,
        pairs=sum(effect.pairs for effect in effects),
    )
    return Difference(whole, uses_sd=uses_sd, rounded=rounded)


def _lines(runs: Sequence[Run], value: Callable[[Run], Quantity | None]) -> list[Line]:
    return [(run, quantity) for run in runs if (quantity := value(run)) is not None]


def _pairs(here: Sequence[Line], there: Sequence[Line]) -> list[tuple[float, float]]:
    """Return the values of the seeds that both arms have."""
    partners = {run.seed: quantity.mean for run, quantity in there if run.seed and run.runs == 1}
    return [(quantity.mean, partners[run.seed]) for run, quantity in here if run.runs == 1 and run.seed in partners]


def _usual_step(lines: Sequence[Line]) -> float:
    """Return the step of the last digit that the numbers of an arm have; some may have lost zeros at their end."""
    return statistics.median_high(quantity.step for _, quantity in lines)


def _common_step(here: Sequence[Line], there: Sequence[Line]) -> float:
    """Return the step of which the values of all single runs of two arms are multiples; 0 where there are means."""
    if any(run.runs != 1 for run, _ in (*here, *there)):
        return 0.0
    values = [quantity.mean for _, quantity in (*here, *there)]
    return grid_step(values, min(_usual_step(here), _usual_step(there)))


def _sample(lines: Sequence[Line], step: float = 0.0) -> _Sample:
    """Pool the lines of an arm: the variance within each line that has one, and that between the lines.

    Args:
        step: of a grid on which the values lie, if it is coarser than the printed digits.
    """
    rounding = max(step, _usual_step(lines)) ** 2 / 12
    counts = [run.runs or 1 for run, _ in lines]
    mean = statistics.fmean((quantity.mean for _, quantity in lines), weights=counts)
    # The mean of several runs without a standard deviation shows no more of the spread than one run does.
    known = [
        (quantity.mean, count if quantity.sd is not None else 1, max(quantity.sd or 0.0, quantity.sd_step / 4))
        for (_, quantity), count in zip(lines, counts, strict=True)
    ]
    total = sum(count for _, count, _ in known)
    center = statistics.fmean((value for value, _, _ in known), weights=[count for _, count, _ in known])
    squares = sum((count - 1) * sd**2 + count * (value - center) ** 2 for value, count, sd in known)
    variance = squares / (total - 1) if total > 1 else 0.0
    return _Sample(mean, sum(counts), variance, total, rounding, all(run.runs == 1 for run, _ in lines))


def _welch(arm: _Sample, reference: _Sample, floor: float) -> Effect:
    """Return the effect between two samples, by Welch: unequal variances, Satterthwaite's degrees of freedom."""
    samples = arm, reference
    variances = [
        max(floor**2 / 2, sample.rounding, sample.variance + sample.single * sample.rounding) for sample in samples
    ]
    shares = [variance / sample.known for variance, sample in zip(variances, samples, strict=True)]
    below = sum(share**2 / max(1, sample.known - 1) for share, sample in zip(shares, samples, strict=True))
    runs = min(sample.known for sample in samples)
    mean = arm.mean - reference.mean
    return Effect(mean, math.sqrt(sum(variances)), math.sqrt(sum(shares)), sum(shares) ** 2 / below, runs)


def _with_known_sd(samples: Sequence[_Sample], sd: float) -> Effect:
    """Return the effect where the standard deviation over seeds is known from elsewhere; one run of each is enough."""
    arm, reference = samples
    error = sd * math.sqrt(1 / arm.count + 1 / reference.count)
    runs = min(arm.count, reference.count)
    return Effect(arm.mean - reference.mean, sd * math.sqrt(2), error, SPREAD_IS_KNOWN, runs)


def _own_sd(samples: Sequence[_Sample]) -> float:
    """Return the standard deviation that the runs of both arms show together, 0 if they show none."""
    freedom = sum(sample.known - 1 for sample in samples)
    squares = sum((sample.known - 1) * sample.variance for sample in samples)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _contradicts(samples: Sequence[_Sample], sd: float) -> bool:
    """Return whether the runs scatter far more than the given standard deviation allows (chi-squared, 1 %)."""
    from scipy.special import chdtrc

    freedom = sum(sample.known - 1 for sample in samples)
    expected = sd**2 + max(sample.rounding for sample in samples)
    return bool(freedom and chdtrc(freedom, freedom * _own_sd(samples) ** 2 / expected) < CONTRADICTION)


def _rounded(difference: Difference, rounding: float) -> Difference:
    """Return the difference with an error of no less than that of rounding."""
    effect = difference.effect
    if effect is None or effect.error >= rounding:
        return difference
    return replace(difference, effect=replace(effect, error=rounding), rounded=True)
