"""Numbers of pairs: upper limits of a spread, Stein's number, and whether what is promised comes true."""

import itertools

import numpy as np
import pytest
from scipy import stats

from ampcompare.results.analysis.inference.effect import Effect, paired_effect, two_stage_effect
from ampcompare.results.analysis.inference.sample_size import (
    pairs_needed_by_stein,
    total_pairs_to_settle,
    upper_limit_of_spread,
)
from ampcompare.results.analysis.inference.verdict import Margin, decide_verdicts

POINT = Margin(0.5, "0.5")


def _settle(
    mean: float, spread: float, pairs: int, alpha: float = 0.05, practical: bool = False
) -> int | None:
    return total_pairs_to_settle(
        mean, spread, pairs - 1, spread / pairs**0.5, 0.5, alpha, practical=practical
    )


def test_the_limit_of_a_spread_covers_it() -> None:
    """The limit lies above the true standard deviation four times in five, at any number of pairs."""
    generator = np.random.default_rng(0)
    for pairs in (3, 5, 10):
        spreads = generator.normal(size=(20_000, pairs)).std(axis=1, ddof=1)
        assert np.mean([upper_limit_of_spread(spread, pairs - 1) > 1 for spread in spreads]) == pytest.approx(
            0.8, abs=0.01
        )
    assert upper_limit_of_spread(1.0, 2) == pytest.approx((2 / stats.chi2.ppf(0.2, 2)) ** 0.5)
    assert upper_limit_of_spread(1.0, 1e9) == pytest.approx(1, abs=1e-3)


def test_what_no_number_settles_is_unknown() -> None:
    """A spread of a thousand margins, and a time at its margin, have no number of pairs that settles them."""
    assert _settle(0.0, 500.0, 5) is None
    assert _settle(-0.5, 1.0, 5, practical=True) is None
    assert str(decide_verdicts([Effect(0.0, 500.0, 223.0, 4, 5)], POINT)[0]) == "inconclusive"


def _promised(word: str) -> int:
    """Return how many more seeds a verdict names."""
    return int(word.partition("≤")[2].split()[0])


def test_the_level_of_the_next_look_counts() -> None:
    """A later look that is tested at a lower level needs more pairs, and none is promised where no look is left."""
    effect = paired_effect([1.2, -0.8, 0.7, -1.1, 0.2], [0.0] * 5, 1e-9)
    now, later, never = (str(decide_verdicts([effect], POINT, 0.05, rate)[0]) for rate in (0.05, 0.005, 0.0))
    assert _promised(now) < _promised(later)
    assert never == "inconclusive"


@pytest.mark.usefixtures("quick_verdicts")
@pytest.mark.parametrize(("truth", "sd"), [(0.0, 0.5), (-0.25, 0.5), (-0.5, 1.0), (0.0, 1.0)])
def test_the_promise_comes_true(truth: float, sd: float) -> None:
    """Of comparisons that inconclusive after five pairs, at least 77 % are settled by the promised pairs."""
    generator = np.random.default_rng(5)
    settled = open_ = 0
    for _ in range(400):
        first = list(generator.normal(truth, sd, 5))
        effect = paired_effect(first, [0.0] * 5, 1e-9)
        if not str(decide_verdicts([effect], POINT, 0.04, 0.005)[0]).startswith("inconclusive"):
            continue
        more = (
            total_pairs_to_settle(effect.mean, effect.spread, 4, effect.error, 0.5, 0.005, practical=False)
            or 0
        ) - 5
        whole = first + list(generator.normal(truth, sd, more))
        open_ += 1
        settled += not str(
            decide_verdicts([paired_effect(whole, [0.0] * len(whole), 1e-9)], POINT, 0.005)[0]
        ).startswith("inconclusive")
    assert open_ > 100
    assert settled / open_ > 0.77


@pytest.mark.usefixtures("quick_verdicts")
@pytest.mark.parametrize("arms", [1, 4])
def test_steins_number_keeps_level_and_power(arms: int) -> None:
    """After a pilot of five, non-inferior is found in 80 % at equality and in at most 5 % at the margin."""
    generator = np.random.default_rng(arms)
    alpha, runs = 0.05 / arms, 3000
    chance = 3 * (alpha * (1 - alpha) / runs) ** 0.5
    for truth, low, high in ((0.0, 0.77, 0.9), (-0.5, 0.6 * alpha, alpha + chance)):
        right, quantile = 0, float(stats.t.ppf(1 - alpha, 4))
        pilots = generator.normal(truth, 0.8, (runs, 5))
        counts = [
            max(5, pairs_needed_by_stein(spread, 4, 0.5, alpha))
            for spread in pilots.std(axis=1, ddof=1).tolist()
        ]
        others = iter(generator.normal(truth, 0.8, sum(counts)).tolist())
        for pilot, count in zip(pilots.tolist(), counts, strict=True):
            whole = [*pilot, *itertools.islice(others, count - 5)]
            effect = two_stage_effect(whole, [0.0] * count, [True] * 5 + [False] * (count - 5), 1e-9)
            right += effect.mean - quantile * effect.error > -0.5
        assert low < right / runs < high


def test_two_stages_by_hand() -> None:
    """The mean is that of all pairs; spread and degrees of freedom are those of the pilot."""
    effect = two_stage_effect([1.0, 3.0, 2.0, 8.0], [0.0] * 4, [True, True, True, False], 1e-9)
    assert (effect.mean, effect.spread, effect.error, effect.freedom, effect.pairs) == (3.5, 1.0, 0.5, 2, 4)
    assert not two_stage_effect([1.0, 3.0, 2.0], [0.0] * 3, [True, True, False], 1e-9).is_testable
