"""The equivalence margin of accuracy: the rule that was asked for, and the points that it gives for a reference.

A rule is fixed before the runs: points, a share of the reference's errors, or standard deviations over seeds. What a
rule computes from runs is itself uncertain, and the tests must still err in 5 % at most where the difference is
exactly the margin. A margin in standard deviations therefore uses a lower limit of the spread, and one that is a share
of the errors is tested with the error of both (`margin_error`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ampcompare.analysis.statistics import ERROR_RATE, MIN_PAIRS, Margin, paired
from ampcompare.errors import ConfigError

__all__ = ["AccuracyMargin", "MarginRule", "margin_error", "parse_margin", "resolve_margin"]

MAX_POINTS = 0.5
MAX_ERROR_SHARE = 0.10
NO_FLOOR = 1e-12  # of a spread: the Poisson total of counts says what a spread of 0 does not
GRAMMAR = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(pp|%|sd)?")
EXAMPLES = "0.5 (points), 10% (of the reference's errors), 2sd (standard deviations over seeds) or auto"


@dataclass(frozen=True)
class MarginRule:
    """How large a difference does not matter.

    Attributes:
        kind: auto is the smaller of 0.5 points and 10 % of the reference's errors.
        amount: in the unit of the kind; 0 for auto.
    """

    kind: Literal["points", "errors", "sd", "auto"]
    amount: float = 0.0

    @property
    def value(self) -> float | str:
        """The rule as a user gives it: a number of points, or a text such as `10%`."""
        if self.kind == "points":
            return self.amount
        return self.kind if self.kind == "auto" else f"{self.amount:g}{'%' if self.kind == 'errors' else 'sd'}"


@dataclass(frozen=True)
class AccuracyMargin:
    """A rule that was applied to the runs of a reference.

    Attributes:
        points: of accuracy, to two digits unless they were given.
        reason: where the points come from.
        error_share: share of the reference's errors that the margin is; 0 if it does not move with them.
    """

    points: float
    reason: str
    error_share: float = 0.0

    def of_share(self) -> Margin:
        """Return the margin of accuracies as shares."""
        return Margin(self.points / 100, f"{self.points:g}")


def parse_margin(value: float | str) -> MarginRule:
    """Read a margin: a number of points, or a text such as `0.5`, `0.5pp`, `10%`, `2sd` or `auto`.

    Raises:
        ConfigError: it cannot be read, or is not above 0.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return MarginRule("auto")
        match = GRAMMAR.fullmatch(text)
        if match is None:
            raise ConfigError(f"the margin is {value}; give a positive number or rule: {EXAMPLES}")
        kind: Literal["points", "errors", "sd"] = (
            "errors" if match[2] == "%" else "sd" if match[2] == "sd" else "points"
        )
        rule = MarginRule(kind, float(match[1]))
    else:
        rule = MarginRule("points", float(value))
    if not (math.isfinite(rule.amount) and rule.amount > 0):
        raise ConfigError(f"the margin is {value}; give a positive number, chosen before the runs: {EXAMPLES}")
    if rule.kind == "errors" and rule.amount > 100:
        raise ConfigError(f"the margin is {value}; more than all errors of the reference cannot be a margin")
    return rule


def resolve_margin(
    rule: MarginRule,
    accuracies: Sequence[float],
    *,
    resolution: float,
    reference: str,
    sd: float | None = None,
    least: bool = False,
) -> AccuracyMargin:
    """Return the points that a rule gives for a reference.

    Without runs, or with fewer than three of them for a standard deviation, it is 0.5 points until there are enough: no
    verdict needs it before.

    Args:
        accuracies: of the reference's completed runs, in points.
        resolution: the least difference of two accuracies in points, such as that of one image. A computed margin is
            not below it.
        reference: name of the arm.
        sd: standard deviation over seeds in points, if it is known from elsewhere.
        least: take the lower 95 % limit of the reference's errors, for tests that know nothing of their error.
    """
    if rule.kind == "points":
        return AccuracyMargin(rule.amount, _in_deviations(rule.amount, accuracies, reference))
    if not accuracies:
        return AccuracyMargin(MAX_POINTS, f"{rule.value}, until {reference} has completed a run")
    if rule.kind == "sd":
        if sd is None and len(accuracies) < MIN_PAIRS:
            return AccuracyMargin(
                MAX_POINTS, f"{rule.value}, until {reference} has completed {MIN_PAIRS} runs that show a spread"
            )
        surely = _least_sd(accuracies) if sd is None else sd
        how = "known" if sd is not None else f"at least, by {len(accuracies)} runs of {reference}"
        return _not_below(resolution, rule.amount * surely, f"{rule.amount:g} sd over seeds of {surely:.2g}, {how}")
    errors = max(0.0, 100 - statistics.fmean(accuracies) - (_half_width(accuracies) if least else 0.0))
    share = MAX_ERROR_SHARE if rule.kind == "auto" else rule.amount / 100
    said = f"{100 * share:g} % of the errors of {reference}, {'at least ' if least else ''}{errors:.2f} %"
    if rule.kind == "auto" and share * errors >= MAX_POINTS:
        return AccuracyMargin(
            MAX_POINTS, f"less than {said}" + _in_deviations(MAX_POINTS, accuracies, reference, before="; ")
        )
    return _not_below(resolution, share * errors, said, 0.0 if least else share)


def margin_error(arm: Sequence[float], reference: Sequence[float], error_share: float) -> float:
    """Return the standard error of paired differences to a margin that may be a share of the reference's errors.

    With accuracies a and r and a share f of the errors, "non-inferior" is a - r > -f (1 - r): the mean of
    a - (1 + f) r is tested, not that of a - r, and above the margin that of a - (1 - f) r. The larger of both errors is
    returned. The tests then keep their level; with the error of a - r alone they would err in up to 10 %.

    Source: Fieller's theorem, as in tests of non-inferiority by a ratio of means.
    """
    moved = ([factor * value for value in reference] for factor in (1 + error_share, 1 - error_share))
    return max(paired(arm, other, NO_FLOOR).error for other in moved)


def _least_sd(values: Sequence[float]) -> float:
    """Return the lower 95 % limit of the standard deviation: as margin it errs to the narrow side."""
    from scipy.special import chdtri

    freedom = len(values) - 1
    return statistics.stdev(values) * math.sqrt(freedom / float(chdtri(freedom, ERROR_RATE)))


def _half_width(values: Sequence[float]) -> float:
    """Return how far the one-sided 95 % limit of a mean lies from it; 0 for fewer than two values."""
    from scipy.special import stdtrit

    if len(values) < 2:
        return 0.0
    return float(stdtrit(len(values) - 1, 1 - ERROR_RATE)) * statistics.stdev(values) / math.sqrt(len(values))


def _not_below(resolution: float, points: float, reason: str, error_share: float = 0.0) -> AccuracyMargin:
    """Return a margin of two digits, rounded down, unless that is less than what can be resolved."""
    if points < resolution:
        return AccuracyMargin(
            _two_digits(resolution, math.ceil), f"the least difference there can be; {reason}, would be less"
        )
    return AccuracyMargin(_two_digits(points, math.floor), reason, error_share)


def _two_digits(value: float, rounding: object) -> float:
    if value <= 0:
        return value
    digits = 1 - math.floor(math.log10(value))
    assert callable(rounding)
    # A value that has two digits already stays as it is, whatever its last bit.
    scaled = round(value * 10.0**digits, 9)
    return float(f"{rounding(scaled) / 10.0**digits:.2g}")


def _in_deviations(points: float, accuracies: Sequence[float], reference: str, before: str = "") -> str:
    """Return a margin in standard deviations of the reference over its seeds; "" where they are not known."""
    spread = statistics.stdev(accuracies) if len(accuracies) >= MIN_PAIRS else 0.0
    return f"{before}{points / spread:.1f} sd of {reference} over seeds" if spread else ""
