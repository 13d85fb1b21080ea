"""A measure of quality: which direction is better, and how two values of it are compared and shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from ampcompare.records.fields import FrozenRecord

__all__ = ["TOP1", "TOP5", "Metric"]


class Metric(FrozenRecord):
    """A measure of quality of a task. Values are stored as they are; `factor` gives the figure that is shown."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    better: Literal["higher", "lower"] = "higher"
    unit: Annotated[str, Field(max_length=20)] = Field("", description="after a shown value, such as %")
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="of a stored value to the one that is shown: 100 for a share in percent"
    )
    decimals: Annotated[int, Field(ge=0, le=12)] = Field(2, description="that a shown value has")
    difference: Literal["points", "ratio", "log ratio"] = Field(
        "points",
        description="how a value differs from the reference's: points: value - reference; "
        "ratio: value / reference - 1; log ratio: ln(value / reference)",
    )
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="usual difference that does not matter: in shown units for points, else as a ratio"
    )
    over_samples: Literal["no", "mean", "share"] = Field(
        "no",
        description="share: of the samples that are right, so that values are counts; mean: of one number per sample",
    )

    def differ(self, value: float, reference: float) -> float:
        """Return how a stored value differs from the reference's; above 0 where it is larger.

        A ratio to a value that is not above 0 is NaN.
        """
        if self.difference == "points":
            return value - reference
        if not (value > 0 and reference > 0):
            return math.nan
        ratio = value / reference
        return ratio - 1 if self.difference == "ratio" else math.log(ratio)

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether a value is better than another, if there is one; NaN never is."""
        if other is None:
            return not math.isnan(value)
        return value > other if self.better == "higher" else value < other

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None if all of them are NaN or there are none."""
        known = [value for value in values if not math.isnan(value)]
        choose = max if self.better == "higher" else min
        return choose(known, default=None)

    def shown(self, value: float) -> str:
        """Return a stored value as it is shown, with its unit."""
        text = f"{self.factor * value:.{self.decimals}f}"
        return f"{text} {self.unit}" if self.unit else text


TOP1 = Metric(name="top-1", unit="%", factor=100.0, margin=0.5, over_samples="share")
TOP5 = Metric(name="top-5", unit="%", factor=100.0, margin=0.5, over_samples="share")
