"""The plain values of a checkpoint, and their types: what a run resumes from besides tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from ampcompare.base.errors import CheckpointError
from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.metric import TOP1, TOP5, Metric
from ampcompare.runs.records.run import Resumption

__all__ = ["NO_VALUE", "Saved", "require_plain_parts", "require_position"]

NO_VALUE = -1.0  # what older checkpoints hold as the best value before the first evaluation

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0.0, le=torch.finfo(torch.float32).max)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _metrics(value: Any) -> Any:
    return tuple(map(Metric.model_validate, value)) if isinstance(value, list) else value


Point = Annotated[tuple[Count, float, Scale | None, Count], BeforeValidator(_as_tuple)]


class _Strict(BaseModel):
    """Values of exactly these types; unknown keys are ignored, because newer versions may write them."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)


class Progress(_Strict):
    """How far the run was, and with how many processes."""

    step: Count
    epoch: Count
    batch: Count
    train_seconds: Seconds
    skipped: Count
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    total_batch_size: Annotated[int, Field(ge=1, le=2**53)]


class Best(_Strict):
    """The best metric so far."""

    value: float | None
    step: Count | None


class Watch(_Strict):
    """The state of the divergence detector."""

    first_nonfinite_loss_step: Count | None
    diverged_step: Count | None
    reason: str | None
    run_start: Count | None


class Trace(_Strict):
    """The points of the loss curve."""

    stride: Annotated[int, Field(ge=1, le=2**53)]
    points: list[Point]
    last: Point | None


class RunMetrics(_Strict):
    """The metrics of the run so far."""

    num_steps: Count
    skipped_steps: Count
    final_loss_scale: Scale | None
    seconds: Tensor
    data_seconds: Tensor
    losses: Tensor
    epochs: list[dict[str, Any]]
    tracer: Trace
    initial_parameters: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class EarlyStop(_Strict):
    """How long the best value has been the best."""

    best: float | None
    waited: Count
    reason: str | None


class Limits(_Strict):
    """Consecutive skipped steps."""

    skipped: Count


class Rollbacks(_Strict):
    """Steps at which the run was rolled back."""

    steps: list[Count]


class Average(_Strict):
    """The EMA; its tensors are checked against the model."""

    decay: Annotated[float, Field(ge=0.0, le=1.0)]
    num_updates: Count
    models: list[dict[str, Any]]


class Parts(_Strict):
    """States by name; policies that the run did not have are missing."""

    watch: Watch
    tally: RunMetrics | None = None
    average: Average | None = None
    early_stop: EarlyStop | None = None
    limits: Limits | None = None
    rollback: Rollbacks | None = None


class Saved(_Strict):
    """The plain values of a checkpoint."""

    arm: str
    trainer: str | None = None
    recipe: dict[str, Any]
    progress: Progress
    best: Best
    parts: Parts
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(_metrics), Field(min_length=1)] = (TOP1, TOP5)
    resumed: list[dict[str, Any]]
    rng: list[Any]
    buffers: list[dict[str, Any]]
    zeroed: list[list[Count]]
    versions: dict[str, Any] = {}


def require_plain_parts(state: Mapping[str, Any]) -> Saved:
    """Return the plain values of a checkpoint after checking their types.

    Raises:
        CheckpointError: names the first wrong entry.
    """
    try:
        saved = Saved.model_validate(dict(state))
        tally = saved.parts.tally
        for epoch in tally.epochs if tally else ():
            EpochResult.model_validate(epoch)
        for resumption in saved.resumed:
            Resumption.model_validate(resumption)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"]) or "an entry"
        raise CheckpointError(f"{path} of the checkpoint is not what a run writes: {fault['msg'][:200]}") from None
    size = saved.progress.world_size
    for name, entries in (("rng", saved.rng), ("buffers", saved.buffers)):
        if len(entries) != size:
            raise CheckpointError(f"{name} of the checkpoint is of {len(entries)} ranks, and {size} wrote it")
    return saved


def require_position(progress: Mapping[str, Any], steps_per_epoch: int, total_steps: int) -> None:
    """Check that a checked position is one that a run of this length can have.

    Raises:
        CheckpointError: steps, epochs and batches do not add up.
    """
    step, epoch, batch = progress["step"], progress["epoch"], progress["batch"]
    # A run that was stopped after the last update of an epoch still lacks its evaluation.
    inside = step == epoch * steps_per_epoch + batch and batch <= steps_per_epoch
    cut_short = step == total_steps and batch == 0 and epoch == math.ceil(total_steps / steps_per_epoch)
    if step > total_steps or not (inside or cut_short):
        raise CheckpointError(
            f"progress of the checkpoint is {step} steps, {epoch} epochs and {batch} batches, and an epoch of this run "
            f"has {steps_per_epoch} of {total_steps} steps; use the checkpoint before it"
        )
