"""A metric: its scores, its differences and how both are written."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcompare.results.records.metric import TOP1, TOP5, Metric

BITS = Metric(name="bits per byte", better="lower", decimals=4, difference="log ratio", margin=0.01)
ERROR = Metric(name="RMSE", better="lower", unit="kg")
POSITIVE = st.floats(0.01, 100)
DIFFERENCES: list[Literal["points", "ratio", "log ratio"]] = ["points", "ratio", "log ratio"]


@given(value=POSITIVE, reference=POSITIVE)
@pytest.mark.parametrize("better", ["higher", "lower"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_scores_differ_as_values_are_compared(
    difference: Literal["points", "ratio", "log ratio"],
    better: Literal["higher", "lower"],
    value: float,
    reference: float,
) -> None:
    """A difference of scores is positive where the value is better, and gives back the difference of the values."""
    metric = Metric(name="m", better=better, difference=difference)
    scores = metric.score(value) - metric.score(reference)
    assert metric.difference_from_score_difference(scores) == pytest.approx(
        metric.difference_from_reference(value, reference), rel=1e-6, abs=1e-9
    )
    assert metric.score_difference_from_difference(
        metric.difference_from_reference(value, reference)
    ) == pytest.approx(scores, rel=1e-6, abs=1e-9)
    if abs(scores) > 1e-9:
        assert (scores > 0) == metric.is_better(value, reference)


def test_how_differences_are_written() -> None:
    """Shares in points, ratios in percent, other numbers in their own unit."""
    assert (TOP1.difference_text_without_unit(0.0125), TOP1.difference_unit, TOP1.margin_text(0.5)) == (
        "+1.25",
        "pp",
        "0.5",
    )
    assert (BITS.difference_text_without_unit(math.log(1.02)), BITS.difference_unit, BITS.margin_text(1)) == (
        "+2.00",
        "%",
        "1 %",
    )
    assert (ERROR.difference_text_without_unit(-0.5), ERROR.difference_unit, ERROR.margin_text(0.2)) == (
        "-0.50",
        "kg",
        "0.2 kg",
    )
    assert (
        TOP1.difference_text_without_unit(-0.00001),
        TOP1.value_text_without_unit(-0.0),
        BITS.difference_text_without_unit(-1e-6),
    ) == (
        "+0.00",
        "0.00",
        "+0.00",
    )
    assert BITS.score_margin(1) == pytest.approx(math.log(1.01))
    assert TOP1.score_margin(0.5) == 0.005


def test_heads_and_tags() -> None:
    """A column's head has the unit once; a tag is one word."""
    assert [metric.column_head for metric in (TOP1, BITS, ERROR)] == ["top-1 %", "bits per byte", "RMSE (kg)"]
    assert [metric.difference_column_head for metric in (TOP1, BITS, ERROR)] == [
        "Δ top-1 (pp)",
        "Δ bits per byte (%)",
        "Δ RMSE (kg)",
    ]
    assert [metric.identifier for metric in (TOP1, TOP5, BITS, Metric(name="Ø"))] == [
        "top1", "top5", "bits_per_byte", "metric",
    ]  # fmt: skip


def test_the_best_is_in_the_right_direction() -> None:
    """The lowest where lower is better; NaN is never the best."""
    assert (TOP1.best([0.1, math.nan, 0.3]), BITS.best([2.0, math.nan, 1.0]), BITS.best([math.nan])) == (
        0.3,
        1.0,
        None,
    )
    assert BITS.is_better(1.0, None)
    assert not BITS.is_better(math.nan, None)
    assert not BITS.is_better(2.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_value_without_a_ratio_has_no_score(value: float) -> None:
    assert math.isnan(BITS.score(value))
    assert math.isnan(BITS.difference_from_reference(value, 1.0))
