"""A run in numbers, and its curves in at most about a hundred points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from ampcompare.runs.records.evaluation import EpochResult, PrecisionResult
from ampcompare.runs.records.fields import Count, Finite, FrozenRecord, Number
from ampcompare.runs.records.metric import TOP5

__all__ = ["RunSummary", "Trace", "loss_tail"]

# Fields of a summary in records that knew only the classification of images.
OLDER_FIELDS = {
    f"{before}top1_{of}": f"{before}metric_{of}" for before in ("", "ema_") for of in ("final", "best", "last_mean")
}
OLDER_NAMES = frozenset({*OLDER_FIELDS, "top5_final"})
PARTS = 5  # the tail is the last of so many


class RunSummary(FrozenRecord):
    """A run in numbers. Shares are 0 to 1, times in seconds, sizes in bytes."""

    metric_final: Number | None = Field(None, description="of the first metric, as it is stored")
    metric_best: Number | None = None
    metric_last_mean: Number | None = Field(None, description="mean over the last `last_epochs` epochs")
    last_epochs: Count = 0
    ema_metric_final: Number | None = Field(None, description="of the averaged weights (EMA), evaluated apart")
    ema_metric_best: Number | None = None
    others_final: dict[str, Number] = Field({}, description="of the other metrics, by name")
    loss_final: Number | None = Field(None, description="mean validation loss of the last epoch")
    epochs: list[EpochResult] = Field([])
    in_precisions: list[PrecisionResult] = Field([], description="the weights at the end in other precisions, if asked")
    num_steps: Count = 0
    loss_tail: Number | None = Field(None, description="mean training loss of the last `loss_tail_steps` steps")
    loss_tail_steps: Count = 0
    losses_sha256: str | None = Field(None, description="over the losses of all steps, as little-endian float64")
    skipped_steps: Count = 0
    warmup_steps: Count = Field(0, description="first steps left out of the times below")
    step_seconds_median: Finite | None = None
    step_seconds_iqr: Finite | None = None
    data_seconds_median: Finite | None = None
    start_seconds: Finite | None = Field(
        None, description="from the start of the process, or of what starts several, until it trains its cell"
    )
    loader_start_seconds: Finite | None = Field(None, description="wait for the first batch of the run")
    samples_per_second: Finite | None = Field(None, description="in the unit of the record: images, tokens, ...")
    epoch_seconds: Finite | None = Field(
        None, description="median wall time of an epoch of training, without evaluation"
    )
    wall_seconds: Finite | None = Field(None, description="since the run was started, or last resumed")
    peak_bytes: Count | None = Field(
        None, description="CUDA: most allocated; CPU: peak of resident memory over its value before the run"
    )
    peak_reserved_bytes: Count | None = Field(None, description="CUDA: most reserved by the allocator")
    final_loss_scale: Number | None = None
    first_nonfinite_loss_step: Count | None = None
    diverged_step: Count | None = Field(None, description="first bad step of a run that diverged")
    divergence: str | None = Field(
        None, description="what was seen: non-finite weights, k non-finite losses in a row, or a limit that was passed"
    )
    ended: str | None = Field(None, description="why training ended before its last epoch, in a good state")
    rollbacks: list[int] = Field([], description="updates made at each return to the last good state")
    weights_sha256: str | None = Field(
        None, description="of the weights at the end: parameters and buffers by value, as float32"
    )
    weights_moved: bool | None = Field(None, description="whether training changed any bit of a parameter")

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """Read a summary that knew only top-1 and top-5."""
        if not isinstance(values, Mapping) or not OLDER_NAMES & values.keys():
            return values
        new = {OLDER_FIELDS.get(name, name): value for name, value in values.items() if name != "top5_final"}
        if values.get("top5_final") is not None:
            new.setdefault("others_final", {TOP5.name: values["top5_final"]})
        return new


class Trace(FrozenRecord):
    """How a run went, in at most about a hundred of its steps, so that a record alone can be drawn."""

    steps: list[int] = Field([], description="updates before each point; the last step is always there")
    losses: list[Number] = Field([], description="loss of that one step, to six digits")
    loss_scales: list[Number] = Field([], description="after the update; empty where nothing is scaled")
    skipped: list[int] = Field([], description="skipped steps up to and with this one")
    step_seconds: list[float] = Field([], description="quantiles of step times after the warm-up, 0, 5, ... 100 %")


def loss_tail(losses: Sequence[float]) -> dict[str, float | int | None]:
    """Return the fields `loss_tail` and `loss_tail_steps` of a summary; no loss for a run without steps.

    Args:
        losses: of each step, in order.
    """
    if not losses:
        return {"loss_tail": None, "loss_tail_steps": 0}
    tail = losses[-max(1, len(losses) // PARTS) :]
    return {"loss_tail": statistics.fmean(tail), "loss_tail_steps": len(tail)}
