"""The number of pairs a test needs: from a known spread, from the upper limit of an observed one, and by Stein's
method."""

import math
from bisect import bisect_left
from collections.abc import Callable

POWER = 0.8
MAX_PAIRS = 10_000


def pairs_needed_by_t_test(spread: float, distance: float, alpha: float) -> int:
    """Return how many pairs a one-sided t test needs to see `distance`, at most `MAX_PAIRS`.

    Source: the noncentral t distribution; the least n whose power reaches `POWER`.
    """
    from scipy.special import nctdtr, stdtrit

    def is_enough(count: int) -> bool:
        shift = distance * math.sqrt(count) / spread
        # Far out the noncentral t is not defined in floating point, and the power is 1.
        return (
            shift > 30 or 1 - float(nctdtr(count - 1, shift, float(stdtrit(count - 1, 1 - alpha)))) >= POWER
        )

    return _least_sufficient_pairs(is_enough)


def upper_limit_of_spread(spread: float, freedom: float) -> float:
    """Return the upper limit of a standard deviation that was estimated, at a confidence of 80 %.

    Source: the chi-square distribution of the variance of normal samples.
    """
    from scipy.special import chdtri

    return spread * math.sqrt(freedom / float(chdtri(freedom, POWER)))


def total_pairs_to_settle(
    mean: float, spread: float, freedom: float, error: float, margin: float, alpha: float, *, practical: bool
) -> int | None:
    """Return how many pairs in all settle a comparison one way or the other with a power of 80 %; None if unknown.

    Mean and spread are uncertain themselves, so the spread is taken at its upper limit, and the distance of the mean
    from a bound as by so much smaller as the mean may be off.

    Args:
        mean: of the differences so far, `error` its standard error.
        alpha: of a one-sided test of one arm.
    """
    from scipy.special import stdtrit

    limit = upper_limit_of_spread(spread, freedom)
    off = float(stdtrit(freedom, POWER)) * error
    ways = [] if practical else [_pairs_needed_for_any_mean(limit, margin, alpha)]
    if abs(mean) - off > (margin if practical else 0):
        ways.append(pairs_needed_by_t_test(limit, abs(mean) - off, alpha / 2))
    if mean - off > -margin:
        ways.append(pairs_needed_by_t_test(limit, mean - off + margin, alpha))
    least = min(ways, default=MAX_PAIRS)
    return least if least < MAX_PAIRS else None


def _pairs_needed_for_any_mean(spread: float, margin: float, alpha: float) -> int:
    """Return how many pairs show that an arm is non-inferior, or that it is, wherever its mean lies.

    Between the means that show the one and those that show the other is a gap, which is small enough where a mean
    misses it with a power of 80 % from its middle.
    """
    from scipy.special import ndtri, stdtrit

    missed = 2 * float(ndtri(1 - POWER / 2))

    def is_enough(count: int) -> bool:
        widths = float(stdtrit(count - 1, 1 - alpha)) + float(stdtrit(count - 1, 1 - alpha / 2))
        return (widths - missed) * spread / math.sqrt(count) <= margin

    return _least_sufficient_pairs(is_enough)


def pairs_needed_by_stein(spread: float, freedom: float, distance: float, alpha: float) -> int:
    """Return how many pairs a one-sided test of Stein's needs to see a distance with a power of 80 %.

    Args:
        spread: the standard deviation of differences in the pilot, which is that of the test as well.
        freedom: degrees of freedom of the spread.
        distance: between the true difference and the margin, in the unit of the spread; above 0.
        alpha: the error rate of the test.

    Returns:
        The number of pairs, with those of the pilot, up to `MAX_PAIRS`.

    Source: Stein 1945, "A two-sample test for a linear hypothesis whose power is independent of the variance".
    """
    from scipy.special import stdtrit

    quantiles = float(stdtrit(freedom, 1 - alpha)) + float(stdtrit(freedom, POWER))
    return min(MAX_PAIRS, math.ceil((quantiles * spread / distance) ** 2))


def round_to_two_digits(count: int) -> int:
    """Return an estimated number without the digits that it does not have."""
    return round(count, 2 - len(str(count))) if count > 100 else count


def _least_sufficient_pairs(enough: Callable[[int], bool]) -> int:
    """Return the least number of pairs that is enough, at most `MAX_PAIRS`; more are then enough too."""
    return bisect_left(range(MAX_PAIRS), True, lo=2, key=enough)
