"""The error rates of looks, and what is said of them."""

import math

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.conclusions.details import interim_look_sentences
from ampcompare.results.analysis.inference.alpha_spending import error_rate_of_next_look
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.records.comparison import Comparison, Look


def _look(number: int = 1, error_rate: float = 0.04, **fields: object) -> Look:
    values: dict[str, object] = {
        "reference": "fp32",
        "arms": ["fp32", "half"],
        "seeds": [0, 1, 2],
        "cells": {"fp32@0": "a", "half@0": "b"},
        "margin": 0.5,
        "time_margin": 0.02,
    }
    return Look.model_validate({"number": number, "error_rate": error_rate, **values, **fields})


def _rates(planned: int | None, number: int) -> list[float]:
    looks: list[Look] = []
    for index in range(number):
        looks.append(_look(index + 1, error_rate_of_next_look(looks, planned)))
    return [look.error_rate for look in looks]


def test_open_looks_share_five_percent() -> None:
    """The first look has 4 %, later ones halve what is left, and all together never spend more than 5 %."""
    assert _rates(None, 4) == pytest.approx([0.04, 0.005, 0.0025, 0.00125])
    assert math.fsum(_rates(None, 60)) <= 0.05


@pytest.mark.parametrize("planned", [1, 2, 3, 5, 20])
def test_planned_looks_spend_all_and_no_more(planned: int) -> None:
    """One look spends 5 %, several 4.5 % up to the last, ever more; nothing is left for one that was not planned."""
    rates = _rates(planned, planned + 2)
    assert math.fsum(rates) == pytest.approx(0.05 if planned == 1 else 0.045)
    assert rates[:planned] == sorted(rates[:planned])
    assert rates[planned] <= 1e-15


def test_a_changed_plan_gets_what_is_left() -> None:
    """More looks after the first get no more than it has left; a look that tests nothing is not the first."""
    assert error_rate_of_next_look([_look(0, 0.0)], None) == pytest.approx(0.04)
    assert error_rate_of_next_look([_look(1, 0.04)], 2) == pytest.approx(0.01)
    assert error_rate_of_next_look([_look(1, 0.05)], None) == 0


def test_no_looks_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of looks is 0"):
        Terms(looks=0)


def _sentences(look: Look, looks: list[Look], left: float) -> list[str]:
    comparison = Comparison(
        command="", reference="fp32", seeds=[], arms=[], reading=[], records=[], look=look.number, looks=looks,
        error_rate=look.error_rate,
    )  # fmt: skip
    return list(interim_look_sentences(comparison, left))


def test_the_reading_says_which_look_it_is() -> None:
    """The first look keeps a rest, the only planned one none, and a later one names those before."""
    assert _sentences(_look(), [_look()], 0.005) == [
        "Look 1 at these arms, tested at an error rate of 4 %; the rest of 5 % is kept for further looks."
    ]
    assert _sentences(_look(1, 0.05), [_look(1, 0.05)], 0.0) == [
        "Look 1 at these arms, tested at an error rate of 5 %, the only one that was planned."
    ]
    second = _look(2, 0.005)
    assert _sentences(second, [_look(), second], 0.0025) == [
        "Look 2 at these arms, tested at an error rate of 0.5 %; look 1 at 4 % with 3 seeds. Together they spend at "
        "most 5 %."
    ]
    assert _sentences(_look(0, 0.0), [_look(0, 0.0)], 0.04) == []
