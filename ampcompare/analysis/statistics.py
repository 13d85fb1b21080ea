"""Statistics of differences between arms: t intervals, non-inferiority, equivalence, Holm, and the fixed verdict words.

An `Effect` is a difference of means, positive where the arm is better than the reference, with what is known of its
error. It may come from pairs, from two separate samples, or from single runs with a published spread; tests and
verdicts are the same for all of these. Units are those of the input.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampcompare.analysis.sample_size import pairs_to_settle

__all__ = [
    "ERROR_RATE",
    "FLOAT32_STEP",
    "MIN_PAIRS",
    "SPREAD_IS_KNOWN",
    "Effect",
    "Margin",
    "PValues",
    "Verdict",
    "decide",
    "float_spread",
    "interval",
    "min_resolvable_spread",
    "p_values",
    "paired",
    "two_stage",
    "unpaired",
    "wilson",
]

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
    def net_counts(self) -> int:
        """The sum of the differences over all pairs, in counts; 0 where values are not counts."""
        return 0 if self.step is None else round(self.mean * self.pairs / self.step)

    @property
    def testable(self) -> bool:
        """Whether there are enough pairs, or a spread known from elsewhere, for a test to mean something."""
        enough = self.pairs >= MIN_PAIRS and self.freedom > MIN_PAIRS - 1.5
        return enough or self.freedom >= SPREAD_IS_KNOWN


@dataclass(frozen=True)
class Margin:
    """The difference that does not matter, chosen before the runs.

    Attributes:
        size: in the unit of the effects.
        shown: as the verdicts print it.
        practical: whether a difference inside the margin is never called better or worse, however sure it is.
    """

    size: float
    shown: str
    practical: bool = False


@dataclass(frozen=True)
class Verdict:
    """A fixed word on one arm, with the interval of the test that decided it, so that the two cannot disagree.

    `equivalent` lies inside the margin, `non-inferior` above its lower end, `better` and `worse` leave 0 out and do not
    lie inside the margin, and `inconclusive` does none of these.

    Attributes:
        word: "" if there is no effect.
        low: lower bound in the unit of the effect; None where nothing was tested, as the other bound.
        confidence: of the two-sided interval, at the level of Holm's step: 1 - 2 alpha for the one-sided tests of
            equivalent and non-inferior, 1 - alpha for the others, or more where those lie inside the margin.
    """

    word: str = ""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class PValues:
    """The p values of one effect: of no difference, of worse than the margin, and of outside the margin."""

    different: float
    non_inferior: float
    equivalent: float


def min_resolvable_spread(samples: int) -> float:
    """Return the smallest plausible spread of a difference of two accuracies over `samples` images.

    An accuracy is a count over `samples`, so that each is off by up to half a count: a uniform error of standard
    deviation 1 / (samples * sqrt(12)), and sqrt(2) times that for a difference. Three seeds that happen to agree to the
    last image show a spread of 0, which is not what is known.
    """
    return 1 / (samples * math.sqrt(6))


def float_spread(values: Sequence[float]) -> float:
    """Return the smallest plausible spread of differences of these values: the rounding of float32.

    Metrics are computed from outputs of the models, which have at most that precision.
    """
    largest = max((abs(value) for value in values), default=0.0)
    return max(largest, TINY) * FLOAT32_STEP / math.sqrt(6)


def paired(arm: Sequence[float], reference: Sequence[float], floor: float, *, counts: bool = False) -> Effect:
    """Return the effect over pairs, by Student's t on the differences.

    Args:
        floor: least spread of a difference, above 0, from the resolution of what was measured.
        counts: whether values are counts, whose rounding has the spread `floor`. It is then added to that of the
            differences, which few small counts often show too small: otherwise 7 % of equal arms have a winner.
    """
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    count = len(differences)
    shown = statistics.stdev(differences) if count > 1 else 0.0
    spread = math.hypot(floor, shown) if counts else max(floor, shown)
    return Effect(statistics.fmean(differences), spread, spread / math.sqrt(count), count - 1, count)


def two_stage(
    arm: Sequence[float], reference: Sequence[float], pilot: Sequence[bool], floor: float, *, counts: bool = False
) -> Effect:
    """Return the effect over all pairs with the spread and the degrees of freedom of a pilot that set their number.

    The number of pairs goes by the pilot's spread, so a spread over all pairs would be too small where the pilot's was.
    With the pilot's the t distribution is exact.

    Args:
        pilot: which pairs belong to it.
        floor: as for `paired`, and so is `counts`.

    Source: Stein 1945, "A two-sample test for a linear hypothesis whose power is independent of the variance".
    """
    whole = paired(arm, reference, floor, counts=counts)
    ours, theirs = ([value for value, early in zip(side, pilot, strict=True) if early] for side in (arm, reference))
    first = paired(ours, theirs, floor, counts=counts)
    return Effect(whole.mean, first.spread, first.spread / math.sqrt(whole.pairs), first.freedom, whole.pairs)


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


def interval(effect: Effect, confidence: float = 1 - ERROR_RATE) -> tuple[float, float] | None:
    """Return the two-sided t interval of an effect, or None where too few pairs show too little of the spread."""
    return _bounds(effect, confidence) if effect.testable else None


def _bounds(effect: Effect, confidence: float) -> tuple[float, float]:
    from scipy.special import stdtrit

    half = float(stdtrit(effect.freedom, (1 + confidence) / 2)) * effect.error
    return effect.mean - half, effect.mean + half


def p_values(effect: Effect, margin: float) -> PValues:
    """Test an effect: two-sided against 0, one-sided against `-margin`, and both bounds of the margin (TOST).

    Source: the shifted one-sample t tests of `scipy.stats.ttest_1samp`; TOST (Schuirmann 1987), whose p value is the
    larger of its two one-sided ones.
    """
    from scipy.special import stdtr

    def above(bound: float, error: float) -> float:
        return float(stdtr(effect.freedom, (bound - effect.mean) / error))

    def below(bound: float, error: float) -> float:
        return float(stdtr(effect.freedom, (effect.mean - bound) / error))

    error = effect.error if effect.margin_error is None else effect.margin_error
    different = min(1.0, 2 * min(above(0, effect.error), below(0, effect.error)))
    non_inferior = max(above(-margin, error), _few_counts(effect, margin, -effect.net_counts))
    not_superior = max(below(margin, error), _few_counts(effect, margin, effect.net_counts))
    return PValues(different, non_inferior, max(non_inferior, not_superior))


def _few_counts(effect: Effect, margin: float, net: int) -> float:
    """Return the probability of at most `net` lost counts in all, were the mean loss the margin; 0 without counts.

    The spread of a few counts says little: three differences of 0 have none. But a loss of m counts per pair comes in
    whole counts, so that their total is Poisson with mean pairs * m where each is rare, and spreads more where gains
    offset losses, which the t test sees. A claim about the margin needs both tests.
    """
    from scipy.special import gammaincc

    if effect.step is None:
        return 0.0
    return float(gammaincc(max(0, net) + 1, effect.pairs * margin / effect.step))


def _margin_bounds(effect: Effect, confidence: float) -> tuple[float, float]:
    """Return the interval of the tests against the margin: that of t, widened to that of the Poisson total."""
    from scipy.special import gammainccinv

    if effect.margin_error is not None:
        effect = replace(effect, error=effect.margin_error)
    low, high = _bounds(effect, confidence)
    if effect.step is None:
        return low, high
    each = effect.step / effect.pairs
    losses, gains = max(0, -effect.net_counts), max(0, effect.net_counts)
    alpha = (1 - confidence) / 2
    return (
        min(low, -float(gammainccinv(losses + 1, alpha)) * each),
        max(high, float(gammainccinv(gains + 1, alpha)) * each),
    )


def wilson(events: int, runs: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate."""
    from scipy.stats import binomtest

    bounds = binomtest(events, runs).proportion_ci(1 - ERROR_RATE, method="wilson")
    return float(bounds.low), float(bounds.high)


def decide(
    effects: Sequence[Effect | None],
    margin: Margin,
    alpha: float = ERROR_RATE,
    next_alpha: float | None = None,
) -> list[Verdict]:
    """Return the verdict of each arm against one reference.

    Each of the three claims (different, non-inferior, equivalent) is tested for all arms at once by Holm's step-down
    method. What is equivalent is not called better as well: a difference inside the margin is one that was said not to
    matter. Effects that are missing or not testable do not count among the tests of the others.

    Args:
        alpha: error rate of each claim over all arms; at 0 nothing is tested.
        next_alpha: that of the next look, by which the pairs that a verdict lacks are counted; `alpha` by default.
    """
    tested = [effect for effect in effects if effect is not None and effect.testable and alpha > 0]
    later = (alpha if next_alpha is None else next_alpha) / max(1, len(tested))
    different, non_inferior, equivalent = (_holm(tested, claim, margin.size, alpha) for claim in CLAIMS)
    verdicts = (
        _verdict(*each, margin, later) for each in zip(tested, different, non_inferior, equivalent, strict=True)
    )
    return [
        Verdict()
        if effect is None
        else Verdict(f"inconclusive (fewer than {MIN_PAIRS} seeds)")
        if not effect.testable
        else next(verdicts)
        if alpha > 0
        else Verdict("inconclusive (not tested)")
        for effect in effects
    ]


@dataclass(frozen=True)
class _Claim:
    """What a test can show of an effect: that its confidence interval lies in a region.

    Attributes:
        p: the p value by which arms are ordered.
        sides: of the interval that the error rate is spent on; a one-sided test at 5 % has an interval of 90 %.
        holds: whether bounds lie in the region, given the margin.
    """

    p: Callable[[PValues], float]
    sides: int
    holds: Callable[[float, float, float], bool]


@dataclass(frozen=True)
class _Step:
    """The step of Holm's method that decided on one effect: its interval at the level of that step."""

    shown: bool
    low: float
    high: float
    confidence: float


DIFFERENT = _Claim(lambda p: p.different, 2, lambda low, high, margin: low > 0 or high < 0)
NON_INFERIOR = _Claim(lambda p: p.non_inferior, 1, lambda low, high, margin: low > -margin)
EQUIVALENT = _Claim(lambda p: p.equivalent, 1, lambda low, high, margin: low > -margin and high < margin)
CLAIMS = (DIFFERENT, NON_INFERIOR, EQUIVALENT)


def _holm(effects: Sequence[Effect], claim: _Claim, margin: float, alpha: float) -> list[_Step]:
    """Test one claim for all effects by Holm's step-down method.

    From the smallest p value on, the level is alpha divided by the number of effects that are left, until the claim
    fails; all that are left then fail at that level. A test is made by its interval, so the two cannot disagree.
    """
    order = sorted(range(len(effects)), key=lambda number: claim.p(p_values(effects[number], margin)))
    steps: dict[int, _Step] = {}
    level, holding = alpha, True
    for rank, number in enumerate(order):
        if holding:
            level = alpha / (len(effects) - rank)
        confidence = 1 - level * 2 / claim.sides
        bounds = _bounds if claim is DIFFERENT else _margin_bounds
        low, high = bounds(effects[number], confidence)
        holding = holding and claim.holds(low, high, margin)
        steps[number] = _Step(holding, low, high, confidence)
    return [steps[number] for number in range(len(effects))]


def _verdict(
    effect: Effect, different: _Step, non_inferior: _Step, equivalent: _Step, margin: Margin, alpha: float
) -> Verdict:
    # The hull of the three fails every claim that failed, so that it suggests none of the other words. Where they have
    # one error it is the widest of them.
    steps = (different, non_inferior, equivalent)
    hull = _Step(
        different.shown, min(step.low for step in steps), max(step.high for step in steps),
        max(step.confidence for step in steps),
    )  # fmt: skip
    if -margin.size < different.low and different.high < margin.size:
        # The claim of equivalence stopped at a stricter step: without the hull, "worse" would stand next to an interval
        # inside the margin.
        different = replace(hull, shown=hull.shown and DIFFERENT.holds(hull.low, hull.high, margin.size))
    matters = different.shown and (not margin.practical or abs(effect.mean) > margin.size)
    if equivalent.shown:
        return _worded(f"equivalent (±{margin.shown})", equivalent)
    if matters and effect.mean > 0:
        return _worded("better", different)
    if non_inferior.shown:
        return _worded(f"non-inferior (margin {margin.shown})", non_inferior)
    if matters:
        return _worded("worse", different)
    return _worded(_inconclusive(effect, margin, alpha), hull)


def _worded(word: str, step: _Step) -> Verdict:
    return Verdict(word, step.low, step.high, step.confidence)


def _inconclusive(effect: Effect, margin: Margin, alpha: float) -> str:
    """Return the word for an open result, with an upper limit of the pairs that settle it at the level of the next."""
    spread = effect.spread * max(1.0, (effect.margin_error or effect.error) / effect.error)
    needed = (
        pairs_to_settle(
            effect.mean, spread, effect.freedom, effect.error, margin.size, alpha, practical=margin.practical
        )
        if alpha > 0
        else None
    )
    if needed is None:
        return "inconclusive"
    more = max(1, needed - effect.pairs)
    if more > 100:
        more = round(more, 2 - len(str(more)))  # an estimate has two digits at most
    return f"inconclusive (≤{more} more seed{'s' if more != 1 else ''})"
