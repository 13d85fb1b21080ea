"""The verdict on each arm: non-inferiority, equivalence and difference, tested by Holm's method."""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ampcompare.results.analysis.inference.effect import (
    ERROR_RATE,
    MIN_PAIRS,
    Effect,
    PValues,
    margin_test_interval,
    p_values,
    t_interval,
)
from ampcompare.results.analysis.inference.sample_size import round_to_two_digits, total_pairs_to_settle
from ampcompare.results.records.comparison import Look
from ampcompare.results.records.verdict import OPEN, Kind, Verdict

EMPTY = Verdict()
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Margin:
    """The difference that does not matter, chosen before the runs, in the unit of the effects and as it is shown.

    Inside a practical one no difference is called better or worse, however sure it is.
    """

    size: float
    shown: str
    practical: bool = False


@dataclass(frozen=True)
class SequentialDesign:
    """The error rates at which a comparison is tested, and the notes about them.

    Attributes:
        error_rate: of each claim over all arms; 0 tests nothing.
        next_error_rate: of the look after this one.
        pilot: seeds whose spread determined the number of seeds.
        look: its number among `looks`, which are all at the run directory; None where looks are not counted.
    """

    error_rate: float = ERROR_RATE
    next_error_rate: float = ERROR_RATE
    pilot: frozenset[int] = frozenset()
    look: int | None = None
    looks: tuple[Look, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What is known of an arm against the reference in one quantity, before any verdict.

    Attributes:
        effect: that a test decides on; None if there is none.
        untested: the verdict without a test: why there is none, or that none is needed; empty where a test decides.
        mean: difference that rows show, tested or not, in the unit of effects; None where nothing is known.
        rounded: whether the error is that of printed digits, which more runs do not reduce.
        survivors: on how many seeds a verdict rests, and how many both arms ran; None if on all.
        updates: how many the runs of the arm and of the reference made, where that may explain a difference.
    """

    effect: Effect | None = None
    untested: Verdict = EMPTY
    mean: float | None = None
    rounded: bool = False
    survivors: tuple[int, int] | None = None
    updates: tuple[float, float] | None = None


def verdicts_on(
    evidence: Mapping[Key, Evidence], margin: Margin, design: SequentialDesign
) -> dict[Key, Verdict]:
    """Return the verdict on each arm of a family of tests, with its effect and interval in the unit of effects.

    One that needs no test takes no share of the error rate. One that rests on surviving seeds, or on other numbers of
    updates, says so.
    """
    tested = {key: its.effect for key, its in evidence.items() if not its.untested}
    decided = decide_verdicts(list(tested.values()), margin, design.error_rate, design.next_error_rate)
    verdicts = {key: its.untested for key, its in evidence.items()} | dict(zip(tested, decided, strict=True))
    return {
        key: _verdict_with_limits_of_evidence(verdicts[key], its, margin) for key, its in evidence.items()
    }


def _verdict_with_limits_of_evidence(verdict: Verdict, evidence: Evidence, margin: Margin) -> Verdict:
    """Return a verdict with the effect that rows show, saying no more than what it rests on allows."""
    update: dict[str, object] = {"effect": evidence.mean}
    if evidence.rounded and evidence.effect and evidence.effect.is_testable and verdict.kind in OPEN:
        update |= {"kind": "inconclusive", "why": "the figures are rounded", "more_seeds": None}
    found = verdict.model_copy(update=update)
    return found.with_updates(evidence.updates, margin.shown).with_survivors(evidence.survivors)


def arms_in_opposite_directions(
    one: Mapping[Key, Evidence], other: Mapping[Key, Evidence], alpha: float = ERROR_RATE
) -> list[Key]:
    """Return the arms that are shown to be better than the reference in one of two quantities and worse in the other.

    Both effects of such an arm differ from 0, so the larger of their p values is that of the claim (an
    intersection-union test). Over the arms it is tested by Holm's method.
    """
    found = []
    for key in one.keys() & other.keys():
        here, there = (None if its.untested else its.effect for its in (one[key], other[key]))
        if here is not None and there is not None and here.is_testable and there.is_testable:
            p = max(p_values(here, 0.0).different, p_values(there, 0.0).different)
            found.append((p if here.mean * there.mean < 0 else 1.0, key))
    found.sort(key=lambda each: each[0])
    held = itertools.takewhile(lambda each: each[1][0] < alpha / (len(found) - each[0]), enumerate(found))
    return [key for _, (_, key) in held]


def decide_verdicts(
    effects: Sequence[Effect | None],
    margin: Margin,
    alpha: float = ERROR_RATE,
    next_alpha: float | None = None,
) -> list[Verdict]:
    """Return the verdict of each arm against one reference.

    Each of the three claims (different, non-inferior, equivalent) is tested for all arms at once by Holm's step-down
    method. Effects that are missing or not testable do not count among the tests of the others.

    Args:
        alpha: error rate of each claim over all arms; at 0 nothing is tested.
        next_alpha: that of the next look, by which the pairs that a verdict lacks are counted; `alpha` by default.
    """
    tested = [effect for effect in effects if effect is not None and effect.is_testable and alpha > 0]
    later = (alpha if next_alpha is None else next_alpha) / max(1, len(tested))
    found = [p_values(effect, margin.size) for effect in tested]
    different, non_inferior, equivalent = (
        _test_claim_by_holm(tested, list(map(claim.p, found)), claim, margin.size, alpha) for claim in CLAIMS
    )
    verdicts = (
        _verdict_of_claims(*each, margin, later)
        for each in zip(tested, different, non_inferior, equivalent, strict=True)
    )
    found_verdicts = []
    for effect in effects:
        if effect is None:
            found_verdicts.append(Verdict())
        elif not effect.is_testable:
            found_verdicts.append(Verdict(kind="few seeds", why=f"fewer than {MIN_PAIRS} seeds"))
        elif alpha > 0:
            found_verdicts.append(next(verdicts))
        else:
            found_verdicts.append(Verdict(kind="not tested", why="not tested"))
    return found_verdicts


@dataclass(frozen=True)
class _HypothesisTest:
    """What a test can show of an effect: that its interval lies in a region, by p value, sides and (bounds, margin).

    A one-sided test at 5 % has an interval of 90 %.
    """

    p: Callable[[PValues], float]
    sides: int
    holds: Callable[[float, float, float], bool]


@dataclass(frozen=True)
class _HolmStep:
    """The step of Holm's method that decided on one effect: its interval at the level of that step."""

    shown: bool
    low: float
    high: float
    confidence: float


DIFFERENT = _HypothesisTest(lambda p: p.different, 2, lambda low, high, margin: low > 0 or high < 0)
NON_INFERIOR = _HypothesisTest(lambda p: p.non_inferior, 1, lambda low, high, margin: low > -margin)
EQUIVALENT = _HypothesisTest(
    lambda p: p.equivalent, 1, lambda low, high, margin: low > -margin and high < margin
)
CLAIMS = (DIFFERENT, NON_INFERIOR, EQUIVALENT)


def _test_claim_by_holm(
    effects: Sequence[Effect], p: Sequence[float], claim: _HypothesisTest, margin: float, alpha: float
) -> list[_HolmStep]:
    """Test one claim for all effects by Holm's step-down method.

    From the smallest value of `p` on, the level is alpha divided by the number of effects that are left, until the
    claim fails; all that are left then fail at that level. A test is made by its interval, so the two cannot disagree.
    """
    order = sorted(range(len(effects)), key=p.__getitem__)
    steps: dict[int, _HolmStep] = {}
    level, holding = alpha, True
    for rank, number in enumerate(order):
        if holding:
            level = alpha / (len(effects) - rank)
        confidence = 1 - level * 2 / claim.sides
        of_claim = t_interval if claim is DIFFERENT else margin_test_interval
        low, high = of_claim(effects[number], confidence)
        holding = holding and claim.holds(low, high, margin)
        steps[number] = _HolmStep(holding, low, high, confidence)
    return [steps[number] for number in range(len(effects))]


def _verdict_of_claims(
    effect: Effect,
    different: _HolmStep,
    non_inferior: _HolmStep,
    equivalent: _HolmStep,
    margin: Margin,
    alpha: float,
) -> Verdict:
    # The hull of the three fails every claim that failed, so that it suggests none of the other words. Where they have
    # one error it is the widest of them.
    steps = (different, non_inferior, equivalent)
    hull = _HolmStep(
        different.shown, min(step.low for step in steps), max(step.high for step in steps),
        max(step.confidence for step in steps),
    )  # fmt: skip
    if -margin.size < different.low and different.high < margin.size:
        # Equivalence stopped at a stricter step: "worse" would stand next to an interval inside the margin.
        different = replace(hull, shown=hull.shown and DIFFERENT.holds(hull.low, hull.high, margin.size))
    matters = different.shown and (not margin.practical or abs(effect.mean) > margin.size)
    if equivalent.shown:
        return _verdict_of_holm_step("equivalent", equivalent, why=f"±{margin.shown}")
    if matters and effect.mean > 0:
        return _verdict_of_holm_step("better", different)
    if non_inferior.shown:
        return _verdict_of_holm_step("non-inferior", non_inferior, why=f"margin {margin.shown}")
    if matters:
        return _verdict_of_holm_step("worse", different)
    return _verdict_of_holm_step(
        "inconclusive", hull, more_seeds=_more_seeds_to_settle(effect, margin, alpha)
    )


def _verdict_of_holm_step(
    kind: Kind, step: _HolmStep, why: str = "", more_seeds: int | None = None
) -> Verdict:
    return Verdict(
        kind=kind, why=why, more_seeds=more_seeds, low=step.low, high=step.high, confidence=step.confidence
    )


def _more_seeds_to_settle(effect: Effect, margin: Margin, alpha: float) -> int | None:
    """Return an upper limit of the seeds that settle an open result at the level of the next look; None if unknown."""
    if alpha <= 0:
        return None
    spread = effect.spread * max(1.0, (effect.margin_error or effect.error) / effect.error)
    needed = total_pairs_to_settle(
        effect.mean, spread, effect.freedom, effect.error, margin.size, alpha, practical=margin.practical
    )
    if needed is None:
        return None
    return round_to_two_digits(max(1, needed - effect.pairs))
