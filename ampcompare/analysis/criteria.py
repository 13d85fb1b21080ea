"""Decision criteria of a comparison: fixed before the runs and printed with the verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ampcompare.analysis.statistics import Margin
from ampcompare.errors import ConfigError
from ampcompare.records.comparison import Comparison

__all__ = ["Criteria", "Preference", "criteria_of"]

Preference = Literal["accuracy", "time", "memory"]


@dataclass(frozen=True)
class Criteria:
    """The equivalence margins of the verdicts, and what the recommendation optimizes.

    Attributes:
        margin: equivalence margin in percentage points of top-1.
        time_margin: equivalence margin as a share of the step time.
        prefer: what the recommended arm improves while it keeps the accuracy.
        tag: a label for the report.

    Raises:
        ConfigError: a margin is not a positive number, or there is no such preference.
    """

    margin: float = 0.5
    time_margin: float = 0.02
    prefer: Preference = "time"
    tag: str = ""

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin), ("time margin", self.time_margin)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the {name} is {value}; give a positive number, chosen before the runs")
        if self.prefer not in get_args(Preference):
            raise ConfigError(f"the objective is {self.prefer!r}; choose one of {', '.join(get_args(Preference))}")

    def accuracy(self) -> Margin:
        """Return the margin of top-1 as a share of images."""
        return Margin(self.margin / 100, f"{self.margin:g}")

    def time(self) -> Margin:
        """Return the margin of the logarithm of a ratio of times."""
        return Margin(math.log1p(self.time_margin), f"{100 * self.time_margin:g} %", practical=True)


def criteria_of(comparison: Comparison) -> Criteria:
    """Return the criteria by which a stored comparison was judged."""
    return Criteria(comparison.margin, comparison.time_margin, cast(Preference, comparison.prefer), comparison.tag)
