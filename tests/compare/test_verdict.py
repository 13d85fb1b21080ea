"""Paired intervals: the numbers, and when there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from ampcompare.compare.verdict import MIN_PAIRS, paired_difference, paired_ratio


def test_interval_by_hand() -> None:
    """Differences 1, 2, 3, 4 have mean 2.5 and the 95 % interval 2.5 -+ 3.182446 * 1.290994 / 2."""
    interval = paired_difference([11, 12, 13, 14], [10, 10, 10, 10])
    assert interval.estimate == 2.5
    assert interval.low == pytest.approx(2.5 - 3.182446305 * 1.290994449 / 2, abs=1e-8)
    assert interval.high == pytest.approx(2.5 + 3.182446305 * 1.290994449 / 2, abs=1e-8)
    assert interval.pairs == 4


SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=12)


@given(SHARES, st.sampled_from([0.9, 0.95, 0.99375]))
def test_interval_is_that_of_the_paired_t_test(pairs: list[tuple[float, float]], confidence: float) -> None:
    """The interval equals the one of `ttest_rel` over the two samples, and the one from the t quantile by hand."""
    arm, reference = map(list, zip(*pairs, strict=True))
    differences = np.subtract(arm, reference)
    assume(np.ptp(differences) > 1e-6)
    interval = paired_difference(arm, reference, confidence)
    low, high = stats.ttest_rel(arm, reference).confidence_interval(confidence)
    half = stats.t.ppf((1 + confidence) / 2, len(pairs) - 1) * differences.std(ddof=1) / math.sqrt(len(pairs))
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-9, abs=1e-12)
    assert (interval.low, interval.high) == pytest.approx((differences.mean() - half, differences.mean() + half))


@pytest.mark.parametrize("pairs", range(1, MIN_PAIRS))
def test_few_pairs_have_no_interval(pairs: int) -> None:
    """Below three pairs there is an estimate and no interval."""
    interval = paired_difference([0.7, 0.9][:pairs], [0.5, 0.6][:pairs])
    assert interval.estimate > 0
    assert (interval.low, interval.high) == (None, None)


def test_equal_differences_have_no_interval() -> None:
    """Pairs that all differ by the same amount show no spread, which is chance, not certainty."""
    interval = paired_difference([0.6, 0.7, 0.8], [0.5, 0.6, 0.7])
    assert interval.estimate == pytest.approx(0.1)
    assert (interval.low, interval.high) == (None, None)


def test_no_difference_at_all() -> None:
    """Pairs without any difference are reported as exactly that."""
    interval = paired_difference([0.6, 0.7, 0.8], [0.6, 0.7, 0.8])
    assert (interval.estimate, interval.low, interval.high) == (0, 0, 0)


def test_ratio_is_geometric() -> None:
    """Twice as slow and twice as fast cancel out, and the interval is that of the logarithms."""
    arm, reference = [2.0, 1.0, 1.0, 4.0], [1.0, 2.0, 1.0, 1.0]
    interval = paired_ratio(arm, reference)
    low, high = stats.ttest_rel(np.log(arm), np.log(reference)).confidence_interval(0.95)
    assert interval.estimate == pytest.approx(4**0.25)
    assert (interval.low, interval.high) == pytest.approx((math.exp(low), math.exp(high)))


@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=6))
def test_ratio_turned_around(seconds: list[float]) -> None:
    """With arm and reference exchanged, the ratio and its bounds are the reciprocals."""
    reference = [value * factor for value, factor in zip(seconds, [1.0, 1.3, 0.8, 2.0, 1.1, 0.9], strict=False)]
    there, back = paired_ratio(seconds, reference), paired_ratio(reference, seconds)
    assert there.low is not None
    assert there.high is not None
    assert (back.estimate, back.low, back.high) == pytest.approx((1 / there.estimate, 1 / there.high, 1 / there.low))


def test_unpaired_runs_are_refused() -> None:
    """Two samples of unequal size are no pairs."""
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])
