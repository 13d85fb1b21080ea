"""The step between neighboring values of a metric."""

import numpy as np
import pytest

from ampcompare.results.analysis.inference.effect import Effect
from ampcompare.results.analysis.pairing.scores import (
    are_multiples,
    grid_step,
    in_steps,
    rounding_spread,
)


@pytest.mark.parametrize(
    ("values", "printed", "step"),
    [
        ([94.0, 96.0, 92.0, 96.0], 0.01, 2.0),  # of 50 images, in percent
        ([0.94, 0.96, 0.92, 0.98], 1e-4, 0.02),
        ([94.17, 94.44, 93.89, 95.0], 0.01, 100 / 360),  # which no decimal step divides
        ([3.1, 3.2, 3.0], 0.1, 0.1),
        ([3.1, 3.1, 3.1], 0.1, 0.1),
        ([47.0, 48.0, 50.0], 1.0, 1.0),
        ([2 / 7, 3 / 7, 5 / 7], 1e-16, 1 / 7),  # logged as it is
        ([float(np.float32(k / 360)) for k in (339, 340, 338)], 1e-16, 1 / 360),
        ([], 0.1, 0.1),
    ],
)
def test_the_step_of_values(values: list[float], printed: float, step: float) -> None:
    """It is that of the digits, of a decimal grid, or of a share of samples."""
    assert grid_step(values, printed) == pytest.approx(step)


def test_values_that_scatter_have_no_coarse_step() -> None:
    """A step found by chance is small against the spread, so that it costs a test nothing."""
    generator = np.random.default_rng(0)
    for printed, digits in ((1e-4, 4), (1e-16, 17)):
        for _ in range(50):
            values = np.round(generator.normal(0.94, 0.01, 6), digits).tolist()
            assert grid_step(values, printed) < 0.002


def test_rounding_of_a_difference_and_multiples() -> None:
    """The spread is that of two uniform errors, and multiples are so up to float32."""
    assert rounding_spread(0.1, 0.1) == pytest.approx(0.1 / 6**0.5)
    assert are_multiples([float(np.float32(0.35))], 0.01)
    assert not are_multiples([0.3501], 0.01)


def test_steps_count_where_they_are_coarse() -> None:
    assert in_steps(Effect(0.0, 1.0, 0.5, 2, 3), 0.5).step == 0.5
    assert in_steps(Effect(0.0, 1.0, 0.5, 2, 3), 0.1).step is None
