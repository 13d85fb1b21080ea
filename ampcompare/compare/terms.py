"""What a comparison is asked: chosen before the runs, printed with the verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ampcompare.compare.verdict import Margin
from ampcompare.errors import ConfigError

__all__ = ["Preference", "Terms"]

Preference = Literal["accuracy", "time", "memory"]


@dataclass(frozen=True)
class Terms:
    """The margins of the verdicts and what a recommendation goes by.

    Attributes:
        margin: points of top-1 that do not matter.
        time_margin: share of the step time that does not matter.
        prefer: what is to be gained, where accuracy is kept.
        tag: a label for the report.

    Raises:
        ConfigError: a margin that is no positive number, or another preference.
    """

    margin: float = 0.5
    time_margin: float = 0.02
    prefer: Preference = "time"
    tag: str = ""

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin), ("time margin", self.time_margin)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the {name} is {value}; it is a positive number, chosen before the runs")
        if self.prefer not in get_args(Preference):
            raise ConfigError(f"prefer is {self.prefer!r}; it is one of {', '.join(get_args(Preference))}")

    def accuracy(self) -> Margin:
        """Return the margin of top-1 as a share of images."""
        return Margin(self.margin / 100, f"{self.margin:g}")

    def time(self) -> Margin:
        """Return the margin of the logarithm of a ratio of times."""
        return Margin(math.log1p(self.time_margin), f"{100 * self.time_margin:g} %", practical=True)
