"""What an evaluation leaves behind: the value of each metric, exact counts, and results of single samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from ampcompare.records.fields import Count, Finite, FrozenRecord, Number
from ampcompare.records.metric import TOP1, TOP5

__all__ = ["EpochResult", "SampleResults"]


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


OLDER = frozenset(
    {"top1_correct", "top5_correct", "ema_top1_correct", "ema_top5_correct", "majority_correct", "images"}
)


def _share(count: Any, samples: Any) -> Any:
    """Return a share; anything else is returned as it is, for the field to refuse."""
    valid = isinstance(count, int) and isinstance(samples, int) and samples > 0
    return count / samples if valid else count
