"""Outliers and halves of step times, by hand and for the shapes that machines have."""

import math

import pytest

from ampcompare.training.run_summary import halves, outlier_share


def test_outliers_by_hand() -> None:
    """Of eleven times one lies beyond three scaled deviations of the median."""
    assert outlier_share([10, 11, 9, 10, 12, 8, 10, 11, 9, 10, 50]) == pytest.approx(1 / 11)


def test_what_is_near_the_median_is_no_outlier() -> None:
    """However steady the other steps are, one within a hundredth of the median is none, and one beyond it is."""
    assert outlier_share([1.0] * 9 + [1.009]) == 0
    assert outlier_share([1.0] * 9 + [1.011]) == pytest.approx(0.1)
    assert outlier_share([]) is None


def test_halves_by_hand() -> None:
    """Each half has its median, and the error is that of two medians by the deviations in each half."""
    two = halves([1.0, 1.1, 0.9, 2.0, 2.2, 1.8])
    assert two is not None
    assert (two.first, two.second) == (1.0, 2.0)
    one = math.sqrt(math.pi / 2) * 1.4826 * 0.1 / math.sqrt(3)
    assert two.error == pytest.approx(math.hypot(one, one))


@pytest.mark.parametrize("seconds", [[], [1.0], [0.0, 0.0, 1.0, 1.0]])
def test_no_halves(seconds: list[float]) -> None:
    """Fewer than two steps, or a median of zero, have no halves to compare."""
    assert halves(seconds) is None
