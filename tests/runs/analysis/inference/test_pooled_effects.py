"""One effect over several experiments: its intervals, and how far experiments differ."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from ampcompare.runs.analysis.forest import pool
from ampcompare.runs.analysis.inference.effect import Effect, interval
from tests.covering import covering

ROUNDS = 2000


def _effect(mean: float, error: float, pairs: int = 5) -> Effect:
    return Effect(mean, error * math.sqrt(pairs), error, pairs - 1, pairs)


def test_the_mean_is_that_of_equal_weights() -> None:
    """An experiment that happens to scatter little gets no more weight, and the interval is that of Student's t."""
    means = [0.1, -0.2, 0.4, 0.3]
    pooled = pool([_effect(mean, error) for mean, error in zip(means, [0.001, 0.5, 0.5, 0.2], strict=True)], 1e-9)
    expected = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert pooled.effect.mean == pytest.approx(0.15)
    assert pooled.effect.pairs == 4
    assert interval(pooled.effect) == pytest.approx((expected.low, expected.high))


def test_the_prediction_is_of_one_more_experiment() -> None:
    """The interval of prediction is that of a further draw from a normal population."""
    means = [0.1, -0.2, 0.4, 0.3]
    pooled = pool([_effect(mean, 0.1) for mean in means], 1e-9)
    half = stats.t.ppf(0.975, 3) * np.std(means, ddof=1) * math.sqrt(1 + 1 / 4)
    assert pooled.prediction == pytest.approx((0.15 - half, 0.15 + half))
    assert pool([_effect(0.1, 0.1), _effect(0.2, 0.1)], 1e-9).prediction is None


def test_what_lies_between_experiments() -> None:
    """The variance between experiments is that of their effects, less the mean of their own; never below 0."""
    means, errors = [1.0, 2.0, 3.0], [0.3, 0.4, 0.5]
    pooled = pool([_effect(mean, error) for mean, error in zip(means, errors, strict=True)], 1e-9)
    within = fmean(error**2 for error in errors)
    assert pooled.tau == pytest.approx(math.sqrt(1 - within))
    assert pooled.i_squared == pytest.approx((1 - within) / 1)
    alike = pool([_effect(1.0, 0.5) for _ in range(3)], 1e-9)
    assert (alike.tau, alike.i_squared) == (0, 0)


def test_effects_that_agree_to_the_last_digit_keep_the_floor() -> None:
    """Equal effects have the resolution of what was measured, not a spread of nothing."""
    assert pool([_effect(1.0, 0.5)] * 4, 0.2).effect.error == pytest.approx(0.1)


@pytest.mark.usefixtures("quick_verdicts")
@covering({"between": [0.0, 1.0], "ratio": [1, 4], "experiments": [3, 6]})
def test_coverage(experiments: int, ratio: int, between: float) -> None:
    """Of three seeds each, some four times as noisy, the mean and one more measurement are covered in 95 % and more."""
    draw = np.random.default_rng(experiments)
    sds = np.resize([1, ratio], experiments) / math.sqrt(3)
    truth = draw.normal(0, between, (ROUNDS, experiments + 1))
    seen = truth + draw.normal(0, 1, truth.shape) * np.append(sds, sds.mean())
    errors = sds * np.sqrt(draw.chisquare(2, (ROUNDS, experiments)) / 2)
    mean_covered = next_covered = 0
    for row, error in zip(seen, errors, strict=True):
        pooled = pool([_effect(mean, own, 3) for mean, own in zip(row[:-1], error, strict=True)], 1e-9)
        low, high = interval(pooled.effect) or (0, 0)
        mean_covered += low <= 0 <= high
        assert pooled.prediction is not None
        next_covered += pooled.prediction[0] <= row[-1] <= pooled.prediction[1]
    least = 0.95 - 3 * math.sqrt(0.95 * 0.05 / ROUNDS)
    assert mean_covered / ROUNDS > least
    assert next_covered / ROUNDS > least - 0.01  # the sd of one more experiment is not theirs
