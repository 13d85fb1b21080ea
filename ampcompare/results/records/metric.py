"""A measure of quality: which direction is better, and how two values of it are compared and shown."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from ampcompare.base.formatting import format_decimal
from ampcompare.results.records.document import FrozenRecord
from ampcompare.settings.script import LOSS, ScriptConfig

MAX_NAME = 40


class Metric(FrozenRecord):
    """A measure of quality of a task. Values are stored as they are; `factor` gives the figure that is shown."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
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

    highest: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None,
        description="largest stored value that it can have, such as 1 for a share; None if there is no limit",
    )

    @property
    def is_count(self) -> bool:
        """Whether a difference of values is one of counts: of samples that are right."""
        return self.over_samples == "share" and self.difference == "points"

    @property
    def has_errors(self) -> bool:
        """Whether 1 minus a value is an error rate."""
        return self.is_count and self.better == "higher"

    @property
    def quality_noun(self) -> str:
        """The name of the measured quantity in sentences: accuracy for top-1, else the metric's name."""
        return "accuracy" if self.name == "top-1" else self.name

    @property
    def column_head(self) -> str:
        """The head of a column of shown values, with the unit."""
        if not self.unit or self.unit in self.name:
            return self.name
        return f"{self.name} %" if self.unit == "%" else f"{self.name} ({self.unit})"

    @property
    def identifier(self) -> str:
        """The name as one word of letters, digits and underscores, such as `top1` or `bits_per_byte`."""
        return re.sub(r"[^A-Za-z0-9]+", "_", self.name.replace("-", "")).strip("_") or "metric"

    @property
    def difference_unit(self) -> str:
        """What shown differences and margins are counted in: pp for shares, % for ratios, else the unit of values."""
        if self.difference != "points":
            return "%"
        return "pp" if self.factor == 100 else self.unit

    @property
    def difference_suffix(self) -> str:
        """The unit of differences as it stands behind one, with its space; "" if there is none."""
        return f" {self.difference_unit}" if self.difference_unit else ""

    @property
    def difference_column_head(self) -> str:
        """The head of a column of shown differences."""
        unit = self.difference_unit
        return f"Δ {self.name}" + (f" ({unit})" if unit and f"({unit})" not in self.name else "")

    @property
    def difference_decimals(self) -> int:
        """Decimals of a shown difference."""
        return self.decimals if self.difference == "points" else 2

    def difference_from_reference(self, value: float, reference: float) -> float:
        """Return how a stored value differs from the reference's; above 0 where it is larger.

        A ratio to a value that is not above 0 is NaN.

        Args:
            value: in the unit in which it is stored.
            reference: in that unit too.
        """
        if self.difference == "points":
            return value - reference
        if not (value > 0 and reference > 0):
            return math.nan
        ratio = value / reference
        return ratio - 1 if self.difference == "ratio" else math.log(ratio)

    def score(self, value: float) -> float:
        """Return a stored value as a score for tests: larger is better, and differences of scores are compared.

        That is the value or, where ratios are compared, its logarithm; negative where lower is better. NaN for a value
        that has no ratio to others.
        """
        if self.difference != "points":
            value = math.log(value) if value > 0 else math.nan
        return value if self.better == "higher" else -value

    def difference_from_score_difference(self, scores: float) -> float:
        """Return a difference as `difference_from_reference` gives it, from a difference of scores."""
        signed = scores if self.better == "higher" else -scores
        return math.expm1(signed) if self.difference == "ratio" else signed

    def score_difference_from_difference(self, difference: float) -> float:
        """Return a difference of scores from one as `difference_from_reference` gives it."""
        signed = math.log1p(difference) if self.difference == "ratio" else difference
        return signed if self.better == "higher" else -signed

    def score_margin(self, margin: float) -> float:
        """Return a margin, which is in the unit of shown differences, as a difference of scores."""
        return margin / self.factor if self.difference == "points" else math.log1p(margin / 100)

    def margin_text(self, margin: float) -> str:
        """Return a margin as verdicts have it, next to a difference in pp, or with its own unit."""
        unit = self.difference_unit
        return f"{margin:g}" if unit in ("", "pp") else f"{margin:g} {unit}"

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether a value is better than another, if there is one; NaN never is.

        Args:
            value: as it is stored.
            other: as it is stored; None for none.
        """
        if other is None:
            return not math.isnan(value)
        return value > other if self.better == "higher" else value < other

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None if all of them are NaN or there are none."""
        known = [value for value in values if not math.isnan(value)]
        choose = max if self.better == "higher" else min
        return choose(known, default=None)

    def value_text_without_unit(self, value: float, decimals: int | None = None) -> str:
        """Return a stored value as it is shown, without its unit.

        Args:
            value: as it is stored.
            decimals: digits behind the point; None for the metric's own.
        """
        return format_decimal(self.factor * value, self.decimals if decimals is None else decimals)

    def value_text(self, value: float, decimals: int | None = None) -> str:
        """Return a stored value as it is shown, with its unit.

        Args:
            value: as it is stored.
            decimals: digits behind the point; None for the metric's own.
        """
        text = self.value_text_without_unit(value, decimals)
        return f"{text} {self.unit}" if self.unit else text

    def difference_in_shown_unit(self, difference: float) -> float:
        """Return a difference, as `difference_from_reference` gives it, in the unit that is shown."""
        if self.difference == "points":
            return self.factor * difference
        return 100 * (math.expm1(difference) if self.difference == "log ratio" else difference)

    def difference_text_without_unit(self, difference: float) -> str:
        """Return a difference, as `difference_from_reference` gives it, without its unit, such as +0.09."""
        return self.signed_shown_difference_text_without_unit(self.difference_in_shown_unit(difference))

    def difference_text_with_unit(self, difference: float) -> str:
        """Return a difference, as `difference_from_reference` gives it, with its unit, such as `+0.09 pp`."""
        return f"{self.difference_text_without_unit(difference)}{self.difference_suffix}"

    def signed_shown_difference_text_without_unit(self, shown: float) -> str:
        """Return a difference that is in the shown unit already, without its unit, such as +0.09."""
        return format_decimal(shown, self.difference_decimals, "+")


TOP1 = Metric(name="top-1", unit="%", factor=100.0, margin=0.5, over_samples="share", highest=1.0)
TOP5 = Metric(name="top-5", unit="%", factor=100.0, margin=0.5, over_samples="share", highest=1.0)


def metrics_of_script(script: ScriptConfig) -> list[Metric]:
    """Return the metrics of a script's cells, as records describe them."""
    if not script.metrics:
        return [Metric(name=LOSS, better="lower", decimals=4, difference="ratio", margin=0.02)]
    return [
        Metric(
            name=one.name,
            better="higher" if one.goal == "max" else "lower",
            decimals=4,
            difference=one.difference,
            margin=0.02 if one.difference == "ratio" else None,
        )
        for one in script.metrics
    ]
