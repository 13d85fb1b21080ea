"""What trained weights reach when they are evaluated in other precisions than their arm's own."""

from __future__ import annotations

from pydantic import Field

from ampcompare.records.fields import Count, FrozenRecord, Number, Share

__all__ = ["PrecisionResult", "PrecisionRow"]


class PrecisionResult(FrozenRecord):
    """The weights of one run in one precision, next to the arm's own evaluation of the same samples.

    An answer is what a model decides: the class of an image, the next byte, the class of a pixel. A task without any
    has whether a sample is right, if its metric is a share of samples, and else none.
    """

    precision: str = Field(description="as --eval-precision takes it")
    averaged: bool = Field(False, description="whether the weights are the averaged ones (EMA)")
    half: str | None = Field(None, description="how 16-bit arithmetic was computed: native or emulated")
    samples: Count = 0
    values: dict[str, Number] = Field({}, description="by name of the metric; empty where the evaluation failed")
    loss: Number | None = None
    answers: Count | None = Field(None, description="answers that were compared; None for a task without any")
    differing: Count | None = Field(None, description="answers that are not those of the arm's own evaluation")
    sample_difference: Number | None = Field(
        None, description="mean over samples of how far the first metric of each moved, where that metric is a mean"
    )
    error: str | None = Field(None, description="why there is no result")


class PrecisionRow(FrozenRecord):
    """An arm over its seeds, evaluated in one precision; differences are to its own evaluation."""

    arm: str
    precision: str
    averaged: bool = False
    half: str | None = None
    runs: Count = Field(0, description="completed runs that were evaluated so")
    own_mean: float | None = Field(None, description="of the first metric, in the arm's own evaluation of these runs")
    metric_mean: Number | None = None
    difference: Number | None = Field(None, description="mean over runs, as `Metric.differ` gives it")
    low: float | None = Field(None, description="of the 95 % interval over seeds; None with fewer than three runs")
    high: float | None = None
    disagreement: Share | None = Field(None, description="share of answers that differ, over runs")
    sample_difference: Number | None = None
    error: str = Field("", description="why runs have no result")
