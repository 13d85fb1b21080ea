"""Looking at the same comparison more than once: the error rate of each look.

A test at 5 % that is repeated as runs come in is wrong more than 5 % of the time. So the looks at one run directory
share the 5 %: what all of them spend is at most that (Bonferroni), however many runs each one adds, and however that is
decided.
"""

import math
from collections.abc import Sequence

from ampcompare.results.analysis.inference.effect import ERROR_RATE
from ampcompare.results.records.comparison import Look

FIRST_SHARE = 0.8
# Of several planned looks. The pairs that are added follow from the spread so far, which then looks a bit too small at
# the end: with all of the 5 %, 5.4 % of equal arms had a winner in two looks.
PLANNED_SHARE = 0.9


def error_rate_of_next_look(looks: Sequence[Look], planned_looks: int | None) -> float:
    """Return what the next look may spend; all together spend at most `ERROR_RATE`.

    Left open, the first look spends 80 % of it, since most comparisons are looked at once, and each later one half of
    what is left. A single planned look spends all; of several the last spends most, by the square of the share of looks
    that are done. Source: error spending of the power family (Kim and DeMets 1987).

    Args:
        looks: those before, with what each has spent.
        planned_looks: how many looks were announced; None if that was left open.

    Returns:
        An error rate, such as 0.04; 0 where no look is left.
    """
    spent = [look.error_rate for look in looks if look.number]
    number, left = len(spent) + 1, max(0.0, ERROR_RATE - math.fsum(spent))
    if planned_looks is None:
        return left / 2 if spent else FIRST_SHARE * ERROR_RATE
    if number > planned_looks:
        return 0.0
    share = PLANNED_SHARE if planned_looks > 1 else 1.0
    return min(left, share * ERROR_RATE * (number**2 - (number - 1) ** 2) / planned_looks**2)
