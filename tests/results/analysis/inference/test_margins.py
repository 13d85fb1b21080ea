"""Margins: how they are read, what they give for a reference, and that tests at a computed margin keep their level."""

from dataclasses import replace

import numpy as np
import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.inference.effect import paired_effect
from ampcompare.results.analysis.inference.terms import (
    MarginRule,
    Terms,
    parse_margin,
    resolve_margin,
    standard_error_for_relative_margin,
)
from ampcompare.results.analysis.inference.verdict import Margin, decide_verdicts
from ampcompare.results.analysis.results_table import judge_arms, read_table

SPREAD = [97.0, 96.8, 97.2, 96.9, 97.1]


@pytest.mark.parametrize(
    ("given", "rule", "value"),
    [
        (0.5, MarginRule("points", 0.5), 0.5),
        (2, MarginRule("points", 2.0), 2.0),
        ("0.5", MarginRule("points", 0.5), 0.5),
        (" .5 PP ", MarginRule("points", 0.5, "pp"), "0.5pp"),
        ("10%", MarginRule("errors", 10), "10%"),
        ("2.5 %", MarginRule("errors", 2.5), "2.5%"),
        ("2sd", MarginRule("sd", 2), "2sd"),
        ("auto", MarginRule("auto"), "auto"),
    ],
)
def test_rules_are_read(given: float | str, rule: MarginRule, value: float | str) -> None:
    """Numbers are points; texts have a unit. Terms keep one form of each."""
    assert parse_margin(given) == rule
    assert Terms(margin=given).margin == value


@pytest.mark.parametrize(
    "given", [0, -1, float("nan"), float("inf"), "0", "-1", "nan", "0%", "101%", "2 sds", "", "%"]
)
def test_what_is_no_margin(given: float | str) -> None:
    """A margin that cannot be read or is not above 0 is refused, with what was given and what can be."""
    with pytest.raises(ConfigError, match=r"the margin is .*(10% |more than all errors)"):
        Terms(margin=given)


@pytest.mark.parametrize(
    ("margin", "accuracies", "points", "reason"),
    [
        ("auto", [76.1], 0.5, "less than 10 % of the errors of fp32, 23.90 %"),
        ("auto", SPREAD, 0.3, "10 % of the errors of fp32, 3.00 %"),
        ("auto", [96.86], 0.31, "10 % of the errors of fp32, 3.14 %"),
        ("auto", [99.9], 0.028, "the least difference there can be; 10 % of the errors of fp32, 0.10 %, would be less"),
        ("auto", [], 0.5, "auto, until fp32 has completed a run"),
        ("20%", SPREAD, 0.6, "20 % of the errors of fp32, 3.00 %"),
        ("2sd", SPREAD, 0.2, "2 sd over seeds of 0.1, at least, by 5 runs of fp32"),
        ("2sd", SPREAD[:2], 0.5, "2sd, until fp32 has completed 3 runs that show a spread"),
        (0.5, SPREAD, 0.5, "3.2 sd of fp32 over seeds"),
        (0.123, [97.0], 0.123, ""),
    ],
)  # fmt: skip
def test_what_a_rule_gives(margin: float | str, accuracies: list[float], points: float, reason: str) -> None:
    """Points to two digits, rounded down, not below the resolution of the validation set, with the reason."""
    found = resolve_margin(parse_margin(margin), accuracies, resolution=100 / 3600, reference="fp32")
    assert (found.points, found.reason) == (points, reason)


def _level(
    margin: float, errors: float, sd: float, correlation: float, count: int, rule: str = "auto"
) -> float:
    """Return in how many of 1000 comparisons an arm that is worse by exactly the margin is called non-inferior."""
    chance = np.random.default_rng(count)
    common, own = chance.standard_normal((2, 1000, count))
    reference = 100 - errors + sd * common
    arm = 100 - errors - margin + sd * (correlation * common + np.sqrt(1 - correlation**2) * own)
    wrong = 0
    for a, r in zip(arm / 100, reference / 100, strict=True):
        found = resolve_margin(parse_margin(rule), [100 * x for x in r], resolution=1e-4, reference="fp32")
        effect = replace(
            paired_effect(a, r, 1e-9),
            margin_error=standard_error_for_relative_margin(a, r, found.error_share),
        )
        # Not rounded down, which would hide a test that errs too often.
        exact = found.error_share * (1 - float(np.mean(r))) or found.points / 100
        (verdict,) = decide_verdicts([effect], Margin(exact, "exact"))
        wrong += str(verdict).startswith(("non-inferior", "equivalent", "better"))
    return wrong / 1000


@pytest.mark.integration
@pytest.mark.usefixtures("quick_verdicts")
@pytest.mark.parametrize("correlation", [0.0, 0.99])
@pytest.mark.parametrize(
    ("rule", "margin", "errors", "sd"),
    [("auto", 0.3, 3.0, 0.2), ("50%", 1.5, 3.0, 0.2), ("auto", 0.5, 5.0, 0.5), ("2sd", 0.4, 3.0, 0.2)],
)
def test_tests_at_a_computed_margin_keep_their_level(
    rule: str, margin: float, errors: float, sd: float, correlation: float
) -> None:
    """A margin that is computed from the reference's runs is random, and false words stay at 5 %: at most 7.1 % of 1000
    are allowed here for chance. Taken as known, the same margins err in up to 33 % (errors) and 45 % (deviations).
    """
    assert _level(margin, errors, sd, correlation, 5, rule) <= 0.071


def test_a_table_has_the_same_rules() -> None:
    """`judge` takes the errors of the reference's runs, and a published standard deviation."""
    lines = [
        f"{arm},{seed},{value + shift}"
        for arm, shift in (("fp32", 0), ("half", -0.02))
        for seed, value in enumerate(SPREAD)
    ]
    table = read_table("arm,seed,accuracy\n" + "\n".join(lines))
    by_errors = judge_arms(table, terms=Terms(margin="10%"))
    assert str(by_errors.arms[1].quality) == "equivalent (±0.28)"  # of at least 2.85 % errors
    assert judge_arms(table, terms=Terms(margin="2sd"), sd=0.16).margin == 0.32
