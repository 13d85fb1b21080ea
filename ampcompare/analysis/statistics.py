"""What differences between arms allow to say: t intervals, non-inferiority, equivalence, Holm, and the fixed words.

An `Effect` is a difference of means, positive where the arm is better than the reference, with what is known of its
error. It may come from pairs, from two separate samples, or from single runs with a spread that somebody published;
every test and verdict follows from it alike. Units are those of what was put in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ERROR_RATE",
    "MIN_PAIRS",
    "POWER",
    "Effect",
    "Margin",
    "PValues",
    "decide",
    "holm",
    "interval",
    "known_spread",
    "min_resolvable_spread",
    "p_values",
    "paired",
    "pairs_needed",
    "together",
    "unpaired",
    "wilson",
]

MIN_PAIRS = 3
ERROR_RATE = 0.05
POWER = 0.8
MAX_PAIRS = 10_000
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
    """

    mean: float
    spread: float
    error: float
    freedom: float
    pairs: int

    @property
    def testable(self) -> bool:
        """Whether there are enough pairs, or a spread known from elsewhere, for a test to mean something."""
        return self.pairs >= MIN_PAIRS or self.freedom >= SPREAD_IS_KNOWN


@dataclass(frozen=True)
class Margin:
    """The difference that does not matter, chosen before the runs.

    Attributes:
        size: in the unit of the effects.
        shown: as the verdicts print it.
        practical: whether a difference inside the margin is never called better or inferior, however sure it is.
    """

    size: float
    shown: str
    practical: bool = False


@dataclass(frozen=True)
class PValues:
    """The p values of one effect: of no difference, of worse than the margin, and of outside the margin."""

    different: float
    not_inferior: float
    equivalent: float


def min_resolvable_spread(samples: int) -> float:
    """Return the least spread that a difference of two accuracies over `samples` images can be believed to have.

    An accuracy is a count over `samples`, so that each is off by up to half a count: a uniform error of standard
    deviation 1 / (samples * sqrt(12)), and sqrt(2) times that for a difference. Three seeds that happen to agree to the
    last image show a spread of 0, which is not what is known.
    """
    return 1 / (samples * math.sqrt(6))


def paired(arm: Sequence[float], reference: Sequence[float], floor: float) -> Effect:
    """Return the effect over pairs, by Student's t on the differences.

    Args:
        floor: least spread of a difference, above 0, from the resolution of what was measured.
    """
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    count = len(differences)
    spread = max(floor, statistics.stdev(differences) if count > 1 else 0.0)
    return Effect(statistics.fmean(differences), spread, spread / math.sqrt(count), count - 1, count)


def unpaired(arm: Sequence[float], reference: Sequence[float], floor: float) -> Effect:
    """Return the effect between two separate samples, by Welch: unequal variances, Satterthwaite's freedom."""
    counts = len(arm), len(reference)
    variances = [
        max(floor**2 / 2, statistics.variance(values) if len(values) > 1 else 0.0) for values in (arm, reference)
    ]
    shares = [variance / count for variance, count in zip(variances, counts, strict=True)]
    below = sum(share**2 / max(1, count - 1) for share, count in zip(shares, counts, strict=True))
    mean = statistics.fmean(arm) - statistics.fmean(reference)
    return Effect(mean, math.sqrt(sum(variances)), math.sqrt(sum(shares)), sum(shares) ** 2 / below, min(counts))


def known_spread(arm: Sequence[float], reference: Sequence[float], sd: float) -> Effect:
    """Return the effect where the standard deviation over seeds is known from elsewhere, one run being enough."""
    error = sd * math.sqrt(1 / len(arm) + 1 / len(reference))
    mean = statistics.fmean(arm) - statistics.fmean(reference)
    return Effect(mean, sd * math.sqrt(2), error, SPREAD_IS_KNOWN, min(len(arm), len(reference)))


def interval(effect: Effect, confidence: float = 1 - ERROR_RATE) -> tuple[float, float] | None:
    """Return the two-sided t interval of an effect, or None where too few pairs show too little of the spread."""
    if not effect.testable:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(effect.freedom, (1 + confidence) / 2)) * effect.error
    return effect.mean - half, effect.mean + half


def together(effects: Sequence[Effect | None]) -> float:
    """Return the confidence of one interval at which those of all testable effects hold together (Bonferroni)."""
    return 1 - ERROR_RATE / max(1, sum(effect is not None and effect.testable for effect in effects))


def p_values(effect: Effect, margin: float) -> PValues:
    """Test an effect: two-sided against 0, one-sided against `-margin`, and both bounds of the margin (TOST).

    Source: the shifted one-sample t tests of `scipy.stats.ttest_1samp`; TOST (Schuirmann 1987), whose p value is the
    larger of its two one-sided ones.
    """
    from scipy.special import stdtr

    def above(bound: float) -> float:
        return float(stdtr(effect.freedom, (bound - effect.mean) / effect.error))

    def below(bound: float) -> float:
        return float(stdtr(effect.freedom, (effect.mean - bound) / effect.error))

    not_inferior = above(-margin)
    return PValues(min(1.0, 2 * min(above(0), below(0))), not_inferior, max(not_inferior, below(margin)))


def holm(values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by Holm's step-down method, in their own order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted = [1.0] * len(values)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def pairs_needed(spread: float, distance: float, alpha: float = ERROR_RATE, power: float = POWER) -> int:
    """Return how many pairs a one-sided t test needs to see `distance`, at most `MAX_PAIRS`.

    A two-sided test has half its alpha on each side.

    Source: the noncentral t distribution; the least n whose power reaches `power`.
    """
    from scipy.special import nctdtr, stdtrit

    def enough(count: int) -> bool:
        shift = distance * math.sqrt(count) / spread
        # Far out the noncentral t is not defined in floating point, and the power is 1.
        return shift > 30 or 1 - float(nctdtr(count - 1, shift, float(stdtrit(count - 1, 1 - alpha)))) >= power

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > MAX_PAIRS:
            return MAX_PAIRS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def wilson(events: int, runs: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate."""
    from scipy.stats import binomtest

    bounds = binomtest(events, runs).proportion_ci(1 - ERROR_RATE, method="wilson")
    return float(bounds.low), float(bounds.high)


def decide(effects: Sequence[Effect | None], margin: Margin) -> list[str]:
    """Return the verdict of each arm against one reference, "" if there is no effect.

    Each of the three claims (different, not inferior, equivalent) is tested for all arms at once, with Holm's
    adjustment. What is equivalent is not called better as well: a difference inside the margin is one that was said not
    to matter.
    """
    tested = [effect for effect in effects if effect is not None and effect.testable]
    results = [p_values(effect, margin.size) for effect in tested]
    adjusted = iter(
        [
            PValues(*together)
            for together in zip(
                holm([result.different for result in results]),
                holm([result.not_inferior for result in results]),
                holm([result.equivalent for result in results]),
                strict=True,
            )
        ]
    )
    alpha = ERROR_RATE / max(1, len(tested))
    return [
        ""
        if effect is None
        else _word(effect, next(adjusted), margin, alpha)
        if effect.testable
        else _cannot_tell(MIN_PAIRS - effect.pairs)
        for effect in effects
    ]


def _word(effect: Effect, p: PValues, margin: Margin, alpha: float) -> str:
    matters = not margin.practical or abs(effect.mean) > margin.size
    different = p.different < ERROR_RATE and matters
    if p.equivalent < ERROR_RATE:
        return f"equivalent (±{margin.shown})"
    if different and effect.mean > 0:
        return "better"
    if p.not_inferior < ERROR_RATE:
        return f"not inferior (margin {margin.shown})"
    if different:
        return "inferior"
    return _cannot_tell(_more_pairs(effect, margin, alpha))


def _more_pairs(effect: Effect, margin: Margin, alpha: float) -> int:
    """Return how many more pairs would settle it one way or the other, were mean and spread as seen so far."""
    ways = []
    if effect.mean and (not margin.practical or abs(effect.mean) > margin.size):
        ways.append(pairs_needed(effect.spread, abs(effect.mean), alpha / 2))
    if effect.mean > -margin.size:
        ways.append(pairs_needed(effect.spread, margin.size + effect.mean, alpha))
    return max(1, min(ways, default=MAX_PAIRS) - effect.pairs)


def _cannot_tell(pairs: int) -> str:
    if pairs > 100:
        pairs = round(pairs, 2 - len(str(pairs)))  # an estimate has two digits at most
    return f"cannot tell (about {pairs} more pair{'s' if pairs != 1 else ''})"
