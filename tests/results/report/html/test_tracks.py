"""Where values stand on the plots with one line per arm."""

import pytest

from ampcompare.results.report.html.tracks import make_plot_scale


@pytest.mark.parametrize("farthest", [0.1, 1.0, 3.9, 60.0, 1e6])
def test_the_margin_stays_visible(farthest: float) -> None:
    """However far an arm is off, the band of the margin has a width that can be seen, and 0 lies in the middle."""
    scale = make_plot_scale([farthest, -0.2], margin=0.5)
    assert scale.position_of(0) == 50
    assert scale.position_of(0.5) - scale.position_of(-0.5) > 3
    assert scale.position_of(farthest) < 100
    assert all(0 <= scale.position_of(tick) <= 100 for tick in scale.ticks())
    assert 3 <= len(scale.ticks()) <= 9


def test_ratios_are_logarithmic() -> None:
    """Twice as slow and twice as fast are equally far from 1."""
    scale = make_plot_scale([0.5, 2.0, 1.0], kind="log")
    assert scale.position_of(1) == pytest.approx(50)
    assert scale.position_of(2) - 50 == pytest.approx(50 - scale.position_of(0.5), abs=0.02)
    assert scale.position_of(0) == 0


@pytest.mark.parametrize("values", [[], [0.0], [float("nan"), float("inf")], [5.0]])
def test_odd_values_have_a_scale_too(values: list[float]) -> None:
    """Nothing measured, one value, and what is not finite give a scale with a width."""
    for scale in (
        make_plot_scale(values),
        make_plot_scale(values, zero=True),
        make_plot_scale(values, margin=0.1),
    ):
        assert scale.high > scale.low
        assert scale.ticks()
