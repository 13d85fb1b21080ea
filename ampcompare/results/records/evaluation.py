"""What an evaluation leaves behind: the value of each metric, exact counts, and results of single samples."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from ampcompare.base.errors import RecordError
from ampcompare.results.records.document import Count, Finite, FrozenRecord, Number, Share
from ampcompare.results.records.metric import TOP1, TOP5

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "EpochResult",
    "PrecisionResult",
    "PrecisionRow",
    "SampleResults",
    "emulated_type",
    "pack_right",
    "pack_values",
    "unpack_samples",
]

OLDER = frozenset(
    {"top1_correct", "top5_correct", "ema_top1_correct", "ema_top5_correct", "majority_correct", "images"}
)
ROUNDING = 1e-4  # relative, of a mean of float32


class SampleResults(FrozenRecord):
    """What a model did on each validation sample, in the order of the data set (`records.per_sample`)."""

    bits: str | None = Field(
        None, description="base64 of one bit per sample, 1 if it is right, the first in the highest bit of a byte"
    )
    values: str | None = Field(
        None, description="base64 of the first metric of each sample, as little-endian float32; where there are no bits"
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
    counts: dict[str, Count] = Field({}, description="samples that are right, of each metric that is a share of them")
    chance: Number | None = Field(None, description="value of the first metric that a constant guess reaches")
    loss: Number | None = Field(None, description="mean validation loss; None for a task that has none")
    ema_values: dict[str, Number] | None = Field(None, description="of the averaged weights; None where none are kept")
    ema_counts: dict[str, Count] = Field({})
    ema_loss: Number | None = None
    train_seconds: Finite
    eval_seconds: Finite
    per_sample: SampleResults | None = Field(
        None, description="of the last evaluation of a run; None of earlier ones, and where indices are not known"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        return _from_older(values) if isinstance(values, Mapping) and OLDER & values.keys() else values

    @property
    def value(self) -> float:
        """Value of the first metric."""
        return next(iter(self.values.values()))

    @property
    def ema_value(self) -> float | None:
        """Value of the first metric with the averaged weights; None where none are kept."""
        return None if self.ema_values is None else next(iter(self.ema_values.values()))


def _from_older(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation of a record that knew only the classification of images: counts of top-1 and top-5."""
    new = {name: value for name, value in old.items() if name not in OLDER}
    samples = old.get("samples")
    for before in ("", "ema_"):
        counts = {
            metric.name: old.get(f"{before}{field}_correct") for metric, field in ((TOP1, "top1"), (TOP5, "top5"))
        }
        if counts[TOP1.name] is not None:
            new[f"{before}counts"] = {name: count for name, count in counts.items() if count is not None}
            new[f"{before}values"] = {
                name: _share(count, samples) for name, count in counts.items() if count is not None
            }
    if old.get("majority_correct") is not None:
        new["chance"] = _share(old["majority_correct"], samples)
    if "images" in old:
        new["per_sample"] = old["images"]
    return new


def _share(count: Any, samples: Any) -> Any:
    """Return a share; anything else is returned as it is, for the field to refuse."""
    valid = isinstance(count, int) and isinstance(samples, int) and samples > 0
    return count / samples if valid else count


def pack_right(right: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return which samples were right, in the form that records keep.

    Args:
        right: (samples,), bool, in the order of the data set.
        labels: (samples,), whole numbers, in the same order.
    """
    import numpy as np

    packed = np.packbits(right).tobytes()
    return SampleResults(bits=base64.b64encode(packed).decode(), sha256=_hash(packed), labels_sha256=_of_labels(labels))


def pack_values(values: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return the value of the first metric for each sample, in the form that records keep.

    Args:
        values: (samples,), numbers, in the order of the data set; kept as float32.
        labels: (samples,), whole numbers that tell the samples apart, in the same order.
    """
    packed = values.astype("<f4").tobytes()
    return SampleResults(
        values=base64.b64encode(packed).decode(), sha256=_hash(packed), labels_sha256=_of_labels(labels)
    )


def unpack_samples(result: EpochResult) -> NDArray[Any] | None:
    """Return what an evaluation found for each sample: (samples,) bool where that is right or wrong, else float64.

    Returns:
        None where it kept nothing.

    Raises:
        RecordError: the text is not what `pack_right` or `pack_values` wrote, or contradicts the evaluation.
    """
    kept = result.per_sample
    if kept is None:
        return None
    return _numbers(result, kept) if kept.bits is None else _right(result, kept, kept.bits)


def _right(result: EpochResult, kept: SampleResults, text: str) -> NDArray[Any]:
    import numpy as np

    packed = _decode(text, -(-result.samples // 8), kept.sha256, result.samples)
    right = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=result.samples).astype(bool)
    counted = next(iter(result.counts.values()), None)
    if int(right.sum()) != counted:
        raise RecordError(f"they count {int(right.sum())} correct samples, and the evaluation {counted}")
    return right


def _numbers(result: EpochResult, kept: SampleResults) -> NDArray[Any]:
    import numpy as np

    packed = _decode(kept.values or "", 4 * result.samples, kept.sha256, result.samples)
    values: NDArray[Any] = np.frombuffer(packed, dtype="<f4").astype(np.float64)
    mean = float(values.mean())
    if not math.isclose(mean, result.value, rel_tol=ROUNDING, abs_tol=ROUNDING * float(np.abs(values).mean())):
        raise RecordError(f"their mean is {mean:.6g}, and the evaluation has {result.value:.6g}")
    return values


def _decode(text: str, size: int, digest: str, samples: int) -> bytes:
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"they are not base64 ({error})") from None
    if len(packed) != size:
        raise RecordError(f"they have {len(packed)} bytes, and {samples} samples take {size}")
    if _hash(packed) != digest:
        raise RecordError("their hash is another than the recorded one")
    return packed


def _hash(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _of_labels(labels: NDArray[Any]) -> str:
    return _hash(labels.astype("<i8").tobytes())


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


def emulated_type(half: str | None) -> str:
    """Return the 16-bit type that was computed in fp32 and rounded; "" where none was.

    Args:
        half: as records have it, such as `fp16 emulated`.
    """
    name, _, how = (half or "").rpartition(" ")
    return name if how == "emulated" else ""


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
