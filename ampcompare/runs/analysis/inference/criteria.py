"""Decision criteria of a comparison: fixed before the runs and printed with the verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ampcompare.base.errors import ConfigError
from ampcompare.runs.analysis.inference.margins import MarginRule, parse_margin
from ampcompare.runs.analysis.inference.verdict import Margin
from ampcompare.runs.records.comparison import LOSS_MARGIN, Comparison

__all__ = ["Criteria", "Preference", "criteria_of"]

Preference = Literal["accuracy", "time", "memory"]


@dataclass(frozen=True)
class Criteria:
    """The equivalence margins of the verdicts, and what the recommendation optimizes.

    Attributes:
        margin: equivalence margin of the metric: a number in the unit of shown differences, or a rule such as "10%" (of
            the reference's errors), "2sd" (standard deviations over seeds) or "auto".
        time_margin: equivalence margin as a share of the step time.
        prefer: what the recommended arm should improve while keeping the accuracy.
        tag: a label for the report.
        loss_margin: equivalence margin of the training loss at the end, as a share of it.
        looks: number of planned looks at the runs; None leaves it open. See `analysis.looks`.

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
        object.__setattr__(self, "margin", self.rule.value)  # "0.5" and 0.5 are equal criteria
        if not (math.isfinite(self.time_margin) and self.time_margin > 0):
            raise ConfigError(f"the time margin is {self.time_margin}; give a positive number, chosen before the runs")
        if not (math.isfinite(self.loss_margin) and self.loss_margin > 0):
            raise ConfigError(f"the loss margin is {self.loss_margin}; give a positive number, chosen before the runs")
        if self.looks is not None and self.looks < 1:
            raise ConfigError(f"the number of looks is {self.looks}; give 1 or more, or leave it open")
        if self.prefer not in get_args(Preference):
            raise ConfigError(f"the objective is {self.prefer!r}; choose one of {', '.join(get_args(Preference))}")

    @property
    def rule(self) -> MarginRule:
        """The rule for the margin of the metric."""
        return parse_margin(self.margin)

    def time(self) -> Margin:
        """Return the margin of the logarithm of a ratio of times."""
        return Margin(math.log1p(self.time_margin), f"{100 * self.time_margin:g} %", practical=True)

    def loss(self) -> Margin:
        """Return the margin of the logarithm of a ratio of training losses."""
        return Margin(math.log1p(self.loss_margin), f"{100 * self.loss_margin:g} %")


def criteria_of(comparison: Comparison) -> Criteria:
    """Return the criteria by which a stored comparison was judged."""
    margin = comparison.margin_rule or comparison.margin
    prefer = cast(Preference, comparison.prefer)
    return Criteria(margin, comparison.time_margin, prefer, comparison.tag, loss_margin=comparison.loss_margin)
