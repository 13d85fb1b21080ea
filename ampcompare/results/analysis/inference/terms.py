"""Terms of a comparison, fixed before the runs and printed with the verdicts.

The margin of the metric is a rule: a number, a share of the reference's errors, or standard deviations over seeds. What
a rule computes from runs is itself uncertain, and the tests must still err in 5 % at most where the difference is
exactly the margin. A margin in standard deviations therefore uses a lower limit of the spread, and one that is a share
of the errors is tested with the error of both (`standard_error_for_relative_margin`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ampcompare.base.errors import ConfigError, require_one_of
from ampcompare.results.analysis.inference.effect import ERROR_RATE, MIN_PAIRS, paired_effect
from ampcompare.results.analysis.inference.verdict import Margin
from ampcompare.results.records.comparison import LOSS_MARGIN, Comparison
from ampcompare.results.records.metric import TOP1, Metric

MAX_ERROR_SHARE = 0.10
NO_FLOOR = 1e-12  # of a spread: the Poisson total of counts says what a spread of 0 does not
GRAMMAR = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(pp|%|sd)?")
EXAMPLES = "0.5 (points), 10% (of the reference's errors), 2sd (standard deviations over seeds) or auto"
FALLBACK = 2.0  # standard deviations over seeds, of a metric that says nothing of differences
OF_COUNTS = 0.5  # points, of a share of right samples that says nothing of differences
UNKNOWN = 1.0  # percent of the value: shown while too few runs show a spread, and then nothing is tested
Preference = Literal["accuracy", "time", "memory"]


@dataclass(frozen=True)
class Terms:
    """The equivalence margins of the verdicts, and what the recommendation optimizes.

    Attributes:
        margin: of the metric: a number in the unit of shown differences, or a rule such as "10%" (of the reference's
            errors), "2sd" (standard deviations over seeds) or "auto".
        time_margin: as a share of the step time, and `loss_margin` of the training loss at the end.
        prefer: what the recommended arm should improve while keeping the quality.
        looks: number of planned looks at the runs; None leaves it open.

    Raises:
        ConfigError: a margin cannot be read or is not positive, or there is no such preference.
    """

    margin: float | str = "auto"
    time_margin: float = 0.02
    prefer: Preference = "time"
    tag: str = ""
    looks: int | None = None
    loss_margin: float = LOSS_MARGIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", self.margin_rule.value_as_given)  # "0.5" and 0.5 are equal terms
        for name in ("time", "loss"):
            if not 0 < (margin := getattr(self, f"{name}_margin")) < math.inf:
                raise ConfigError(
                    f"the {name} margin is {100 * margin:g} %; give one above 0, chosen before the runs"
                )
        if self.looks is not None and self.looks < 1:
            raise ConfigError(f"the number of looks is {self.looks}; give 1 or more, or leave it open")
        require_one_of(get_args(Preference), "the objective", self.prefer)

    @property
    def margin_rule(self) -> MarginRule:
        """The rule for the margin of the metric."""
        return parse_margin(self.margin)

    def log_time_margin(self) -> Margin:
        """Return the margin of the logarithm of a ratio of times."""
        return Margin(math.log1p(self.time_margin), f"{100 * self.time_margin:g} %", practical=True)

    def log_loss_margin(self) -> Margin:
        """Return the margin of the logarithm of a ratio of training losses."""
        return Margin(math.log1p(self.loss_margin), f"{100 * self.loss_margin:g} %")


def terms_of_comparison(comparison: Comparison) -> Terms:
    """Return the terms by which a stored comparison was judged."""
    margin = comparison.margin_rule or comparison.margin
    prefer = cast(Preference, comparison.prefer)
    return Terms(margin, comparison.time_margin, prefer, comparison.tag, loss_margin=comparison.loss_margin)


@dataclass(frozen=True)
class MarginRule:
    """How large a difference does not matter.

    Attributes:
        kind: points is a number in the unit of shown differences, percent of the values where ratios are compared. auto
            is the usual margin of the metric or, where that is less, 10 % of the reference's errors.
        amount: in the unit of the kind; 0 for auto.
        unit: pp where a number was given in percentage points; "" is the metric's own unit.
    """

    kind: Literal["points", "errors", "sd", "auto"]
    amount: float = 0.0
    unit: Literal["", "pp"] = ""

    @property
    def value_as_given(self) -> float | str:
        """The rule as a user gives it: a number of points, or a text such as `10%`."""
        if self.kind == "points":
            return f"{self.amount}{self.unit}" if self.unit else self.amount
        return (
            self.kind if self.kind == "auto" else f"{self.amount:g}{'%' if self.kind == 'errors' else 'sd'}"
        )


@dataclass(frozen=True)
class QualityMargin:
    """A rule that was applied to the runs of a reference.

    Attributes:
        points: in the unit of shown differences, to two digits unless they were given.
        error_share: share of the reference's errors that the margin is; 0 if it does not move with them.
    """

    points: float
    reason: str
    error_share: float = 0.0
    metric: Metric = TOP1

    def margin_of_score_differences(self) -> Margin:
        """Return the margin of differences of scores, which are tested."""
        return Margin(self.metric.score_margin(self.points), self.metric.margin_text(self.points))


def parse_margin(value: float | str) -> MarginRule:
    """Read a margin: a number of points, or a text such as `0.5`, `0.5pp`, `10%`, `2sd` or `auto`.

    Raises:
        ConfigError: it is no such text, not above 0, or more than all errors.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return MarginRule("auto")
        match = GRAMMAR.fullmatch(text)
        if match is None:
            raise ConfigError(f"the margin is {value}; give a positive number or rule: {EXAMPLES}")
        kinds: dict[str, Literal["errors", "sd"]] = {"%": "errors", "sd": "sd"}
        rule = MarginRule(kinds.get(match[2], "points"), float(match[1]), "pp" if match[2] == "pp" else "")
    else:
        rule = MarginRule("points", float(value))
    if not (math.isfinite(rule.amount) and rule.amount > 0):
        raise ConfigError(
            f"the margin is {value}; give a positive number, chosen before the runs: {EXAMPLES}"
        )
    if rule.kind == "errors" and rule.amount > 100:
        raise ConfigError(f"the margin is {value}; more than all errors of the reference cannot be a margin")
    return rule


def check_margin(rule: MarginRule, metric: Metric) -> None:
    """Refuse a margin that means nothing for a metric.

    Args:
        rule: how the margin is given.
        metric: that it is for.

    Raises:
        ConfigError: it is a share of errors of a metric that counts none, or percentage points of one that has none.
    """
    if rule.kind == "errors" and not metric.has_errors and metric.difference == "points":
        why = f"is a share of the reference's errors, and {metric.name} counts none"
    elif rule.unit and metric.difference_unit != rule.unit:
        why = f"is in percentage points, and differences of {metric.name} are not"
    else:
        return
    unit = f"a number in {metric.difference_unit}" if metric.difference_unit else "a number (a difference)"
    raise ConfigError(f"a margin of {rule.value_as_given} {why}; give {unit}, or 2sd")


def resolve_margin(
    rule: MarginRule,
    values: Sequence[float],
    *,
    metric: Metric = TOP1,
    resolution: float,
    reference: str,
    sd: float | None = None,
    from_lower_limit: bool = False,
) -> QualityMargin:
    """Return the number that a rule gives for a reference.

    Until there are enough runs for a rule it is the usual margin of the metric: no verdict needs it before.

    Args:
        values: of the reference's completed runs, in the unit that is shown.
        resolution: the least difference of two values, such as that of one image. A computed margin is not below it.
        sd: standard deviation over seeds in the unit that is shown, if it is known from elsewhere.
        from_lower_limit: take the lower 95 % limit of the reference's errors, for tests that ignore the margin's error.

    Raises:
        ConfigError: the rule does not fit the metric.
    """
    check_margin(rule, metric)
    in_units = [_value_in_margin_unit(value, metric) for value in values]
    usual = _default_margin(metric, values)
    if rule.kind == "errors" and not metric.has_errors:
        rule = MarginRule("points", rule.amount)  # what ratios are compared by is a percentage

    def usual_margin(reason: str) -> QualityMargin:
        return QualityMargin(usual, reason, metric=metric)

    def compute_margin(points: float, reason: str, error_share: float = 0.0) -> QualityMargin:
        if points < resolution:
            why = f"the least difference there can be; {reason}, would be less"
            return QualityMargin(_round_to_two_digits(resolution, math.ceil), why, metric=metric)
        return QualityMargin(_round_to_two_digits(points, math.floor), reason, error_share, metric)

    if rule.kind == "points":
        return QualityMargin(
            rule.amount, _margin_in_deviations_text(rule.amount, in_units, reference), metric=metric
        )
    if rule.kind == "auto" and not metric.has_errors:
        if metric.margin is not None:
            deviations = _margin_in_deviations_text(usual, in_units, reference, before=", ")
            return usual_margin(f"the usual one of {metric.name}{deviations}")
        rule = MarginRule("sd", FALLBACK)
    if not values:
        return usual_margin(f"{rule.value_as_given}, until {reference} has completed a run")
    if rule.kind == "sd":
        if sd is None and len(values) < MIN_PAIRS:
            return usual_margin(
                f"{rule.value_as_given}, until {reference} has completed {MIN_PAIRS} runs that show a spread"
            )
        surely = _lower_limit_of_sd(in_units) if sd is None else sd
        how = "known" if sd is not None else f"at least, by {len(values)} runs of {reference}"
        return compute_margin(rule.amount * surely, f"{rule.amount:g} sd over seeds of {surely:.2g}, {how}")
    errors = max(
        0.0,
        100 - statistics.fmean(values) - (_half_width_of_mean_interval(values) if from_lower_limit else 0.0),
    )
    share = MAX_ERROR_SHARE if rule.kind == "auto" else rule.amount / 100
    said = f"{100 * share:g} % of the errors of {reference}, {'at least ' if from_lower_limit else ''}{errors:.2f} %"
    if rule.kind == "auto" and share * errors >= usual:
        return usual_margin(
            f"less than {said}" + _margin_in_deviations_text(usual, in_units, reference, before="; ")
        )
    return compute_margin(share * errors, said, 0.0 if from_lower_limit else share)


def _default_margin(metric: Metric, values: Sequence[float]) -> float:
    """Return the usual margin in the unit of shown differences, or what is shown where there is none."""
    if metric.margin is not None:
        return metric.margin if metric.difference == "points" else 100 * metric.margin
    if metric.difference != "points":
        return UNKNOWN
    if metric.has_errors:
        return OF_COUNTS * metric.factor / 100
    return (
        _round_to_two_digits(UNKNOWN / 100 * abs(statistics.fmean(values)), math.floor)
        if any(values)
        else UNKNOWN
    )


def _value_in_margin_unit(value: float, metric: Metric) -> float:
    """Return a shown value on a scale whose differences are in the unit of margins."""
    if metric.difference == "points":
        return value
    return 100 * math.log(value / metric.factor) if value > 0 else math.nan


def standard_error_for_relative_margin(
    arm: Sequence[float], reference: Sequence[float], error_share: float
) -> float:
    """Return the standard error of paired differences to a margin that may be a share of the reference's errors.

    With accuracies a and r and a share f of the errors, "non-inferior" is a - r > -f (1 - r): the mean of
    a - (1 + f) r is tested, not that of a - r, and above the margin that of a - (1 - f) r. Of both errors the larger
    keeps the level; with the error of a - r alone the tests would err in up to 10 %.

    Source: Fieller's theorem, as in tests of non-inferiority by a ratio of means.
    """
    moved = ([factor * value for value in reference] for factor in (1 + error_share, 1 - error_share))
    return max(paired_effect(arm, other, NO_FLOOR).error for other in moved)


def _lower_limit_of_sd(values: Sequence[float]) -> float:
    """Return the lower 95 % limit of the standard deviation: as margin it errs to the narrow side."""
    from scipy.special import chdtri

    freedom = len(values) - 1
    return statistics.stdev(values) * math.sqrt(freedom / float(chdtri(freedom, ERROR_RATE)))


def _half_width_of_mean_interval(values: Sequence[float]) -> float:
    """Return how far the one-sided 95 % limit of a mean lies from it; 0 for fewer than two values."""
    from scipy.special import stdtrit

    if len(values) < 2:
        return 0.0
    return float(stdtrit(len(values) - 1, 1 - ERROR_RATE)) * statistics.stdev(values) / math.sqrt(len(values))


def _round_to_two_digits(value: float, rounding: Callable[[float], int]) -> float:
    if value <= 0:
        return value
    unit = 10.0 ** (1 - math.floor(math.log10(value)))
    # A value that has two digits already stays as it is, whatever its last bit.
    return float(f"{rounding(round(value * unit, 9)) / unit:.2g}")


def _margin_in_deviations_text(
    points: float, values: Sequence[float], reference: str, before: str = ""
) -> str:
    """Return a margin in standard deviations of the reference over its seeds; "" where they are not known."""
    spread = statistics.stdev(values) if len(values) >= MIN_PAIRS else 0.0
    return f"{before}{points / spread:.1f} sd of {reference} over seeds" if spread else ""
