"""What an evaluation leaves behind: the value of each metric, exact counts, and results of single samples."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from ampcompare.base.errors import RecordError
from ampcompare.results.records.document import ArmLabel, Count, Finite, FrozenRecord, Number, Share
from ampcompare.results.records.metric import TOP1, TOP5

if TYPE_CHECKING:
    from numpy.typing import NDArray

OLDER_METRICS = {"top1": TOP1, "top5": TOP5}
OLDER = {
    "images",
    "majority_correct",
    *(f"{before}{name}_correct" for name in OLDER_METRICS for before in ("", "ema_")),
}


class SampleResults(FrozenRecord):
    """What a model did on each validation sample, in the order of the data set (`records.per_sample`)."""

    bits: str | None = Field(
        None,
        description="base64 of one bit per sample, 1 if it is right, the first in the highest bit of a byte",
    )
    values: str | None = Field(
        None,
        description="base64 of the first metric of each sample, as little-endian float32; where there are no bits",
    )
    sha256: str = Field(description="over the bytes")
    labels_sha256: str = Field(
        description="over the labels in the same order, as little-endian int64: equal where two runs saw one set"
    )


class EpochResult(FrozenRecord):
    """Evaluation after one epoch over the whole validation set, and what the epoch took.

    A metric that is a share of samples is kept as a count; its value is that count over `samples`.
    """

    epoch: Count
    samples: Annotated[int, Field(ge=1)]
    values: dict[str, Number] = Field(
        min_length=1, description="by name of the metric; the first is the one of verdicts"
    )
    counts: dict[str, Count] = Field(
        {}, description="samples that are right, of each metric that is a share of them"
    )
    chance: Number | None = Field(None, description="value of the first metric that a constant guess reaches")
    loss: Number | None = Field(None, description="mean validation loss; None for a task that has none")
    ema_values: dict[str, Number] | None = Field(
        None, description="of the averaged weights; None where none are kept"
    )
    ema_counts: dict[str, Count] = Field({})
    ema_loss: Number | None = None
    train_seconds: Finite
    eval_seconds: Finite
    per_sample: SampleResults | None = Field(
        None,
        description="of the last evaluation of a run; None of earlier ones, and where indices are not known",
    )

    @model_validator(mode="before")
    @classmethod
    def _convert_older_evaluation(cls, values: Any) -> Any:
        return (
            _evaluation_of_older_record(values)
            if isinstance(values, Mapping) and OLDER & values.keys()
            else values
        )

    @property
    def value(self) -> float:
        """Value of the first metric."""
        return next(iter(self.values.values()))

    @property
    def ema_value(self) -> float | None:
        """Value of the first metric with the averaged weights; None where none are kept."""
        return None if self.ema_values is None else next(iter(self.ema_values.values()))


def _evaluation_of_older_record(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation of a record that knew only the classification of images: counts of top-1 and top-5."""
    new = {name: value for name, value in old.items() if name not in OLDER}
    samples = max(1, int(old.get("samples", 1)))
    for before in ("", "ema_"):
        counts = {metric.name: old.get(f"{before}{field}_correct") for field, metric in OLDER_METRICS.items()}
        if known := {name: count for name, count in counts.items() if count is not None}:
            new[f"{before}counts"] = known
            new[f"{before}values"] = {name: count / samples for name, count in known.items()}
    if old.get("majority_correct") is not None:
        new["chance"] = old["majority_correct"] / samples
    return {**new, "per_sample": old["images"]} if "images" in old else new


def pack_right_samples(right: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return which samples were right, in the form that records keep.

    Args:
        right: (samples,) bool, in the order of the data set.
        labels: (samples,) whole numbers; their digest tells data sets apart.
    """
    import numpy as np

    packed = np.packbits(right).tobytes()
    return SampleResults(
        bits=base64.b64encode(packed).decode(),
        sha256=_hash_of_packed_samples(packed),
        labels_sha256=_hash_of_labels(labels),
    )


def pack_sample_values(values: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return the value of the first metric for each sample, in the form that records keep.

    Args:
        values: (samples,) in any floating type; float32 is kept.
        labels: (samples,) whole numbers; their digest tells data sets apart.
    """
    packed = values.astype("<f4").tobytes()
    return SampleResults(
        values=base64.b64encode(packed).decode(),
        sha256=_hash_of_packed_samples(packed),
        labels_sha256=_hash_of_labels(labels),
    )


def unpack_samples(result: EpochResult) -> NDArray[Any] | None:
    """Return what an evaluation found for each sample: (samples,) bool where that is right or wrong, else float64.

    Returns:
        None where it kept nothing.

    Raises:
        RecordError: the text is not what `pack_right_samples` or `pack_sample_values` wrote.
    """
    import numpy as np

    kept = result.per_sample
    if kept is None:
        return None
    try:
        packed = base64.b64decode(kept.values or "" if kept.bits is None else kept.bits, validate=True)
    except ValueError as error:
        raise RecordError(f"they are not base64 ({error})") from None
    if _hash_of_packed_samples(packed) != kept.sha256:
        raise RecordError("their hash is another than the recorded one")
    if kept.bits is None:
        return np.frombuffer(packed, dtype="<f4").astype(np.float64)
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=result.samples).astype(bool)


def _hash_of_packed_samples(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _hash_of_labels(labels: NDArray[Any]) -> str:
    return _hash_of_packed_samples(labels.astype("<i8").tobytes())


class PrecisionResult(FrozenRecord):
    """The weights of one run in one precision, next to the arm's own evaluation of the same samples.

    An answer is what a model decides: the class of an image, the next byte, the class of a pixel. A task without any
    has whether a sample is right, if its metric is a share of samples, and else none.
    """

    precision: str = Field(description="as --eval-precision takes it")
    averaged: bool = Field(False, description="whether the weights are the averaged ones (EMA)")
    half: str | None = Field(None, description="how 16-bit arithmetic was computed: native or emulated")
    samples: Count = 0
    values: dict[str, Number] = Field(
        {}, description="by name of the metric; empty where the evaluation failed"
    )
    loss: Number | None = None
    answers: Count | None = Field(None, description="answers that were compared; None for a task without any")
    differing: Count | None = Field(
        None, description="answers that are not those of the arm's own evaluation"
    )
    sample_difference: Number | None = Field(
        None,
        description="mean over samples of how far the first metric of each moved, where that metric is a mean",
    )
    error: str | None = Field(None, description="why there is no result")


def emulated_type(half: str | None) -> str:
    """Return the 16-bit type that was computed in fp32 and rounded, by words such as `fp16 emulated`; "" for none."""
    name, _, how = (half or "").rpartition(" ")
    return name if how == "emulated" else ""


class PrecisionRow(FrozenRecord):
    """An arm over its seeds, evaluated in one precision; differences are to its own evaluation."""

    arm: ArmLabel
    precision: str
    averaged: bool = False
    half: str | None = None
    runs: Count = Field(0, description="completed runs that were evaluated so")
    own_mean: float | None = Field(
        None, description="of the first metric, in the arm's own evaluation of these runs"
    )
    metric_mean: Number | None = None
    difference: Number | None = Field(
        None, description="mean over runs, by `Metric.difference_from_reference`"
    )
    low: float | None = Field(
        None, description="of the 95 % interval over seeds; None with fewer than three runs"
    )
    high: float | None = None
    disagreement: Share | None = Field(None, description="share of answers that differ, over runs")
    sample_difference: Number | None = None
    error: str = Field("", description="why runs have no result")
