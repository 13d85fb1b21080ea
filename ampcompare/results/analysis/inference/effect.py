"""The difference between two arms with its error, its t intervals, and its p values against 0 and a margin.

An `Effect` is a difference of means, positive where the arm is better than the reference, with what is known of its
error. It may come from pairs, from two separate samples, or from single runs with a published spread; tests and
verdicts are the same for all of these. Units are those of the input.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_PAIRS = 3
ERROR_RATE = 0.05
FLOAT32_STEP = 2.0**-23  # of two neighbors, relative
TINY = 1e-30
SPREAD_IS_KNOWN = 1e9  # degrees of freedom at which Student's t is the normal distribution


@dataclass(frozen=True)
class Effect:
    """A difference of means, arm minus reference or the other way round where less is better.

    Attributes:
        mean: of the difference.
        spread: standard deviation of the difference in one pair.
        error: standard error of `mean`.
        freedom: degrees of freedom behind `error`.
        pairs: runs of the smaller side.
        margin_error: standard error in tests against the margin, which may move with the reference; None if `error`.
        step: what one count is worth where values are counts, such as 1 / images; None where they are none.
    """

    mean: float
    spread: float
    error: float
    freedom: float
    pairs: int
    margin_error: float | None = None
    step: float | None = None

    @property
    def net_difference_in_counts(self) -> int:
        """The sum of the differences over all pairs, in counts; 0 where values are not counts."""
        return 0 if self.step is None else round(self.mean * self.pairs / self.step)

    @property
    def is_testable(self) -> bool:
        """Whether there are enough pairs, or a spread known from elsewhere, for a test to mean something."""
        enough = self.pairs >= MIN_PAIRS and self.freedom > MIN_PAIRS - 1.5
        return enough or self.freedom >= SPREAD_IS_KNOWN


@dataclass(frozen=True)
class PValues:
    """The p values of one effect: of no difference, of worse than the margin, and of outside the margin."""

    different: float
    non_inferior: float
    equivalent: float


def least_spread_of_accuracies(samples: int) -> float:
    """Return the smallest plausible spread of a difference of two accuracies over `samples` images.

    Each is off by up to half a count: a uniform error of standard deviation 1 / (samples * sqrt(12)), and sqrt(2) times
    that for a difference. Three seeds that agree to the last image show a spread of 0, which is not what is known.
    """
    return 1 / (samples * math.sqrt(6))


def least_spread_of_float32(values: Sequence[float]) -> float:
    """Return the smallest plausible spread of differences of these values: the rounding of float32."""
    largest = max((abs(value) for value in values), default=0.0)
    return max(largest, TINY) * FLOAT32_STEP / math.sqrt(6)


def paired_effect(
    arm: Sequence[float], reference: Sequence[float], floor: float, *, is_rounded: bool = False
) -> Effect:
    """Return the effect over pairs, by Student's t on the differences.

    Args:
        floor: least spread of a difference, above 0, from the resolution of what was measured.
        is_rounded: whether values are counts, or printed with few digits, and their rounding has the spread `floor`,
            which is then added to that of the differences: otherwise 7 % of equal arms have a winner.
    """
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    count = len(differences)
    shown = statistics.stdev(differences) if count > 1 else 0.0
    spread = math.hypot(floor, shown) if is_rounded else max(floor, shown)
    return Effect(statistics.fmean(differences), spread, spread / math.sqrt(count), count - 1, count)


def two_stage_effect(
    arm: Sequence[float],
    reference: Sequence[float],
    pilot: Sequence[bool],
    floor: float,
    *,
    is_rounded: bool = False,
) -> Effect:
    """Return the effect over all pairs with the spread and the degrees of freedom of a pilot that set their number.

    With these the t distribution is exact: a spread over all pairs would be too small where the pilot's was.

    Source: Stein 1945, "A two-sample test for a linear hypothesis whose power is independent of the variance".
    """
    whole = paired_effect(arm, reference, floor, is_rounded=is_rounded)
    if all(pilot):
        return whole
    ours, theirs = values_of_pilot(arm, pilot), values_of_pilot(reference, pilot)
    first = paired_effect(ours, theirs, floor, is_rounded=is_rounded)
    return Effect(whole.mean, first.spread, first.spread / math.sqrt(whole.pairs), first.freedom, whole.pairs)


def values_of_pilot(values: Sequence[float], pilot: Sequence[bool]) -> list[float]:
    """Return the values of the pairs of a pilot.

    Args:
        values: of all pairs, in their order.
        pilot: of each pair, whether it is one of the pilot.
    """
    return [value for value, is_early in zip(values, pilot, strict=True) if is_early]


def unpaired_effect(
    arm: Sequence[float], reference: Sequence[float], floor: float, *, is_rounded: bool = False
) -> Effect:
    """Return the effect between two separate samples, by Welch: unequal variances, Satterthwaite's freedom."""
    counts = len(arm), len(reference)
    shown = [statistics.variance(values) if len(values) > 1 else 0.0 for values in (arm, reference)]
    variances = [floor**2 / 2 + each if is_rounded else max(floor**2 / 2, each) for each in shown]
    return welch_effect(statistics.fmean(arm) - statistics.fmean(reference), variances, counts)


def welch_effect(mean: float, variances: Sequence[float], counts: Sequence[int]) -> Effect:
    """Return the effect of a difference of two means, by the variance of each sample and the number of its runs."""
    shares = [variance / count for variance, count in zip(variances, counts, strict=True)]
    below = sum(share**2 / max(1, count - 1) for share, count in zip(shares, counts, strict=True))
    return Effect(
        mean, math.sqrt(sum(variances)), math.sqrt(sum(shares)), sum(shares) ** 2 / below, min(counts)
    )


def interval_if_testable(effect: Effect, confidence: float = 1 - ERROR_RATE) -> tuple[float, float] | None:
    """Return the two-sided t interval of an effect, or None where too few pairs show too little of the spread."""
    return t_interval(effect, confidence) if effect.is_testable else None


def t_interval(effect: Effect, confidence: float) -> tuple[float, float]:
    """Return the two-sided t interval of an effect, whether or not it is testable."""
    from scipy.special import stdtrit

    half = float(stdtrit(effect.freedom, (1 + confidence) / 2)) * effect.error
    return effect.mean - half, effect.mean + half


def p_values(effect: Effect, margin: float) -> PValues:
    """Test an effect: two-sided against 0, one-sided against `-margin`, and both bounds of the margin (TOST).

    Source: the shifted one-sample t tests of `scipy.stats.ttest_1samp`; TOST (Schuirmann 1987), whose p value is the
    larger of its two one-sided ones.
    """
    from scipy.special import stdtr

    def p_of_above(bound: float, error: float) -> float:
        return float(stdtr(effect.freedom, (bound - effect.mean) / error))

    def p_of_below(bound: float, error: float) -> float:
        return float(stdtr(effect.freedom, (effect.mean - bound) / error))

    error = effect.error if effect.margin_error is None else effect.margin_error
    different = min(1.0, 2 * min(p_of_above(0, effect.error), p_of_below(0, effect.error)))
    non_inferior = max(
        p_of_above(-margin, error),
        _probability_of_few_lost_counts(effect, margin, -effect.net_difference_in_counts),
    )
    not_superior = max(
        p_of_below(margin, error),
        _probability_of_few_lost_counts(effect, margin, effect.net_difference_in_counts),
    )
    return PValues(different, non_inferior, max(non_inferior, not_superior))


def _probability_of_few_lost_counts(effect: Effect, margin: float, net: int) -> float:
    """Return the probability of at most `net` lost counts in all, were the mean loss the margin; 0 without counts.

    The spread of a few counts says little: three differences of 0 have none. But the total of a loss of m counts per
    pair is Poisson with mean pairs * m where each is rare, and spreads more where gains offset losses, which the t test
    sees. A claim about the margin needs both tests.
    """
    from scipy.special import gammaincc

    if effect.step is None:
        return 0.0
    return float(gammaincc(max(0, net) + 1, effect.pairs * margin / effect.step))


def margin_test_interval(effect: Effect, confidence: float) -> tuple[float, float]:
    """Return the interval of the tests against the margin: that of t, widened to that of the Poisson total."""
    from scipy.special import gammainccinv

    if effect.margin_error is not None:
        effect = replace(effect, error=effect.margin_error)
    low, high = t_interval(effect, confidence)
    if effect.step is None:
        return low, high
    each = effect.step / effect.pairs
    losses, gains = max(0, -effect.net_difference_in_counts), max(0, effect.net_difference_in_counts)
    alpha = (1 - confidence) / 2
    return (
        min(low, -float(gammainccinv(losses + 1, alpha)) * each),
        max(high, float(gammainccinv(gains + 1, alpha)) * each),
    )


def wilson_interval(events: int, runs: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate."""
    from scipy.stats import binomtest

    bounds = binomtest(events, runs).proportion_ci(1 - ERROR_RATE, method="wilson")
    return float(bounds.low), float(bounds.high)
