"""Images and seeds as crossed random effects: mean squares, error for new images, images needed."""

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import ttest_1samp

from ampcompare.results.analysis.effects.samples import (
    MeanSquaresOfDifferences,
    mean_squares_of_differences,
    samples_needed_for_equivalence,
    standard_error_and_freedom_over_new_samples,
)
from ampcompare.results.analysis.inference.effect import least_spread_of_accuracies


def draws(seeds: int = 4, images: int = 200, rate: float = 0.3) -> np.ndarray:
    """Differences of -1, 0 and 1."""
    return np.random.default_rng(seeds + images).choice(
        [-1, 0, 1], (seeds, images), p=[rate / 2, 1 - rate, rate / 2]
    )


def test_mean_squares_are_those_of_the_analysis_of_variance() -> None:
    """Sums of squares by the definition, cell by cell, give the same three mean squares."""
    d = draws()
    seeds, images = d.shape
    mean, by_seed, by_image = d.mean(), d.mean(1, keepdims=True), d.mean(0, keepdims=True)
    found = mean_squares_of_differences(d)
    assert found.seeds == pytest.approx(images * ((by_seed - mean) ** 2).sum() / (seeds - 1))
    assert found.samples == pytest.approx(seeds * ((by_image - mean) ** 2).sum() / (images - 1))
    rest = ((d - by_seed - by_image + mean) ** 2).sum()
    assert found.residual == pytest.approx(rest / ((seeds - 1) * (images - 1)))


def test_without_an_effect_of_images_the_error_is_that_over_seeds() -> None:
    """Where images vary no more than the residual, the error and its freedom are those of the paired t test."""
    d = draws()
    squares = mean_squares_of_differences(d)
    assert squares.samples < squares.residual
    error, freedom = standard_error_and_freedom_over_new_samples(squares)
    over_seeds = ttest_1samp(d.mean(1), 0)
    assert error == pytest.approx(d.mean() / over_seeds.statistic)
    assert freedom == pytest.approx(over_seeds.df)


def test_equal_differences_in_all_seeds_are_known_as_well_as_images_allow() -> None:
    """If every seed gives the same differences, seeds add nothing: the error is that of a mean over images."""
    row = np.array([1] * 30 + [-1] * 30 + [0] * 540)
    error, freedom = standard_error_and_freedom_over_new_samples(
        mean_squares_of_differences(np.stack([row] * 5))
    )
    floor = least_spread_of_accuracies(600) / np.sqrt(5)
    assert error == pytest.approx(np.hypot(row.std(ddof=1) / np.sqrt(600), floor), rel=1e-6)
    assert freedom > 1000


def test_images_that_all_agree_are_no_proof() -> None:
    """With no disagreement on m images, the interval reaches about as far as the rule of three: 3 / m."""
    error, freedom = standard_error_and_freedom_over_new_samples(
        mean_squares_of_differences(np.zeros((3, 400), dtype=np.int8))
    )
    assert freedom > 100
    assert 2.5 / 400 < 1.96 * error < 3.5 / 400


def test_more_images_are_needed_for_a_smaller_margin() -> None:
    """With that many images, the same components of variance give an error that fits the margin with that power."""
    squares = MeanSquaresOfDifferences(samples=0.2, seeds=0.1, residual=0.1, num_seeds=5, num_samples=400)
    needed = [samples_needed_for_equivalence(squares, margin) or 0 for margin in (0.02, 0.01, 0.005)]
    # Half of the variance 0.2 is over seeds, which leaves 4 * (0.2 / 0.1)^2 = 16 degrees of freedom.
    sure = stdtrit(16, 0.95) + stdtrit(16, 0.9)
    for margin, count in zip((0.02, 0.01, 0.005), needed, strict=True):
        assert sure * (0.2 / (5 * count)) ** 0.5 == pytest.approx(margin, rel=0.02)


def test_no_number_of_images_replaces_seeds() -> None:
    """Where runs of one seed differ as a whole by more than the margin, more images do not settle it."""
    few = MeanSquaresOfDifferences(samples=0.1, seeds=4.0, residual=0.1, num_seeds=3, num_samples=400)
    assert samples_needed_for_equivalence(few, 0.005) is None


@pytest.mark.parametrize("seeds", [3, 10])
def test_the_interval_covers_the_difference_on_new_images(seeds: int) -> None:
    """With image effects a 95 % interval over seeds misses the truth, and the one for new images covers it."""
    draw = np.random.default_rng(7)
    kinds = draw.choice([0.5, -0.5, 0.0], (1000, 1, 360), p=[0.06, 0.06, 0.88])  # truth: no difference
    d = (np.sign(kinds) * (draw.random((1000, seeds, 360)) < np.abs(kinds))).astype(np.int8)
    means = d.mean((1, 2))
    error, freedom = standard_error_and_freedom_over_new_samples(mean_squares_of_differences(d))
    covered = np.abs(means) <= stdtrit(freedom, 0.975) * error
    over_seeds = d.mean(2).std(1, ddof=1) / np.sqrt(seeds)
    naive = np.abs(means) <= stdtrit(seeds - 1, 0.975) * over_seeds
    assert 0.925 <= covered.mean() <= 0.975
    assert naive.mean() < (0.85 if seeds == 3 else 0.6)
