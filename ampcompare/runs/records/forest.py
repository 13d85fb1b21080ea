"""Several experiments side by side: the effect of each arm in each of them, and over all of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ampcompare.runs.records.document import SCHEMA
from ampcompare.runs.records.fields import FrozenRecord
from ampcompare.runs.records.metric import TOP1, Metric

__all__ = ["Experiment", "ExperimentEffect", "Forest", "Measure", "PooledEffect"]

Measure = Literal["accuracy", "time"]


class Experiment(FrozenRecord):
    """One run directory, or several of equal settings."""

    name: str
    model: str
    data: str
    seeds: list[int]


class ExperimentEffect(FrozenRecord):
    """An arm against the reference in one experiment: a difference of the metric, or a ratio of step times."""

    arm: str
    measure: Measure
    experiment: str
    pairs: int = 0
    value: float | None = None
    low: float | None = Field(None, description="of the interval of 95 % of this effect alone")
    high: float | None = None
    left_out: str = Field("", description="why the effect is not among the pooled ones; empty if it is")


class PooledEffect(FrozenRecord):
    """An arm against the reference over all experiments that could test it, each of equal weight."""

    arm: str
    measure: Measure
    experiments: int
    value: float
    low: float | None = Field(None, description="of the interval of the test behind `verdict`")
    high: float | None = None
    confidence: float | None = Field(None, description="two-sided, of that interval")
    prediction_low: float | None = Field(None, description="of what another experiment would measure, at 95 %")
    prediction_high: float | None = None
    tau: float = Field(description="standard deviation between experiments; of the logarithm for ratios of times")
    i_squared: float = Field(description="share of the variance of the effects that is between experiments")
    verdict: str = ""


class Forest(FrozenRecord):
    """All effects, and the terms that the verdicts go by."""

    schema_number: int = Field(SCHEMA, alias="schema")
    reference: str
    metric: Metric = Field(TOP1, description="that the accuracy is measured by")
    margin: float = Field(description="equivalence margin of the metric, in the unit of shown differences")
    time_margin: float = Field(description="share of the step time that does not matter")
    headline: list[str] = Field([], description="the answer, one sentence each, the most important first; plain text")
    experiments: list[Experiment]
    effects: list[ExperimentEffect]
    pooled: list[PooledEffect]
    notes: list[str] = Field([], description="what a reader should know of how they were pooled")
