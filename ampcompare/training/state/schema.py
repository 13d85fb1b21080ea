"""The plain values of a checkpoint, checked before a run resumes from it.

The checksum of a file detects damage, not whether its values make sense together. The numbers of a run are stored more
than once (steps, losses, points of the loss curve), so that most edits by hand contradict the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from ampcompare.base.errors import CheckpointError, RecordError
from ampcompare.runs.records.evaluation import EpochResult, unpack_samples
from ampcompare.runs.records.metric import TOP1, TOP5, Metric
from ampcompare.runs.records.run import Resumption
from ampcompare.training.checkpoint.convert.scalers import parse_scale
from ampcompare.training.checkpoint.store.layout import CONVERTED, PRECISION_KEYS
from ampcompare.training.state.capture import require_random_states

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
    stateless: list[list[Count]] | None = None
    versions: dict[str, Any] = {}


def require_plain_parts(state: Mapping[str, Any]) -> Saved:
    """Return the plain values of a checkpoint after checking that a run may have written them.

    Raises:
        CheckpointError: names the first wrong entry, its value, and what it contradicts.
    """
    try:
        saved = Saved.model_validate(dict(state))
        tally = saved.parts.tally
        epochs = [EpochResult.model_validate(epoch) for epoch in (tally.epochs if tally else ())]
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
    for rank, states in enumerate(saved.rng):
        require_random_states(states, f"rng.{rank} of the checkpoint")
    for fault_text in chain(_contradictions(saved, epochs), () if CONVERTED in state else _in_scale(state, saved)):
        raise CheckpointError(f"{fault_text}; the checkpoint contradicts itself, use the one before it")
    return saved


def _contradictions(saved: Saved, epochs: list[EpochResult]) -> Iterator[str]:
    """Yield a line for each number that others in the checkpoint contradict."""
    progress, parts = saved.progress, saved.parts
    if progress.skipped > progress.step:
        yield f"progress.skipped is {progress.skipped} of {progress.step} steps"
    if len(saved.resumed) and max(int(each["step"]) for each in saved.resumed) > progress.step:
        yield "resumed names a later step than progress"
    if parts.tally is not None:
        yield from _in_tally(parts.tally, progress, epochs)
        yield from _in_best(saved, epochs)
        yield from _in_watch(parts.watch, parts.tally.losses.tolist(), rolled_back=_was_rolled_back(parts))
    if parts.average is not None and parts.average.num_updates != progress.step and not _was_rolled_back(parts):
        yield f"parts.average.num_updates is {parts.average.num_updates} after {progress.step} steps"
    if parts.limits is not None and parts.limits.skipped > progress.skipped:
        yield f"parts.limits.skipped is {parts.limits.skipped}, and {progress.skipped} steps were skipped"
    if parts.rollback is not None and any(step > progress.step for step in parts.rollback.steps):
        yield "parts.rollback.steps names a later step than progress"


def _in_scale(state: Mapping[str, Any], saved: Saved) -> Iterator[str]:
    """Compare the loss scale with the one that the last step left, if nothing changed it in between."""
    if saved.parts.tally is None:
        return
    last = saved.parts.tally.tracer.last
    moved = _was_rolled_back(saved.parts) or any(int(each["step"]) == saved.progress.step for each in saved.resumed)
    if last is None or moved:
        return
    if last[2] is not None and last[2] != saved.parts.tally.final_loss_scale:
        yield f"parts.tally.final_loss_scale is {saved.parts.tally.final_loss_scale}, and the last step left {last[2]}"
    key = next((key for key in PRECISION_KEYS if key in state), "")
    scaler = state.get(key)
    if isinstance(scaler, Mapping) and len(scaler) and all(isinstance(entry, Mapping) for entry in scaler.values()):
        scaler = next(iter(scaler.values()))  # of several Apex scalers, the steps record the first one
    if not isinstance(scaler, Mapping):
        yield f"{key or 'the state of the loss scaler'} is a {type(scaler).__name__}"
        return
    scale = scaler.get("scale", scaler.get("loss_scale"))
    if scale is not None:
        parse_scale(scale, key)
    left = last[2]
    if left is None or scale is None:
        agrees = scale is left
    else:
        agrees = math.isclose(scale, left, rel_tol=1e-6)
    if not agrees:
        yield f"the loss scale in {key} is {scale}, and the last step left {left}"


def _was_rolled_back(parts: Parts) -> bool:
    return parts.rollback is not None and len(parts.rollback.steps) > 0


def _in_tally(tally: RunMetrics, progress: Progress, epochs: list[EpochResult]) -> Iterator[str]:
    for name in ("losses", "seconds", "data_seconds"):
        values = getattr(tally, name)
        if values.dtype is not torch.float64 or values.dim() != 1:
            yield f"parts.tally.{name} is {values.dtype} of shape {list(values.shape)}"
            return
        if name != "losses" and not bool(((values >= 0) & values.isfinite()).all()):
            yield f"parts.tally.{name} holds values that are not times"
    if tally.num_steps != progress.step or len(tally.losses) != progress.step:
        yield f"parts.tally has {tally.num_steps} steps and {len(tally.losses)} losses, and progress {progress.step}"
        return
    if len(tally.seconds) != len(tally.data_seconds) or len(tally.seconds) > tally.num_steps:
        yield f"parts.tally.seconds has {len(tally.seconds)} of {tally.num_steps} steps"
    if tally.skipped_steps != progress.skipped:
        yield f"parts.tally.skipped_steps is {tally.skipped_steps}, and progress.skipped {progress.skipped}"
    if [epoch.epoch for epoch in epochs] != list(range(progress.epoch)):
        yield f"parts.tally.epochs are not the {progress.epoch} of progress"
    for epoch in epochs:
        counts = [*epoch.counts.values(), *epoch.ema_counts.values()]
        if any(count > epoch.samples for count in counts):
            yield f"parts.tally.epochs.{epoch.epoch} counts {counts} of {epoch.samples} samples"
        for values, counted in ((epoch.values, epoch.counts), (epoch.ema_values or {}, epoch.ema_counts)):
            wrong = [name for name, count in counted.items() if values.get(name) != count / epoch.samples]
            if wrong:
                yield f"parts.tally.epochs.{epoch.epoch} has another {wrong[0]} than its counts"
        try:
            unpack_samples(epoch)
        except RecordError as error:
            yield f"the per-image results of parts.tally.epochs.{epoch.epoch} are damaged: {error}"
    yield from _in_trace(tally)


def _in_trace(tally: RunMetrics) -> Iterator[str]:
    trace, losses = tally.tracer, tally.losses.tolist()
    if [point[0] for point in trace.points] != list(range(0, tally.num_steps, trace.stride)):
        yield f"parts.tally.tracer.points are not every {trace.stride}th of {tally.num_steps} steps"
        return
    if (trace.last is None) != (not losses) or (trace.last is not None and trace.last[0] != tally.num_steps - 1):
        yield "parts.tally.tracer.last is not the last step"
        return
    skipped = 0
    for step, loss, _, count in [*trace.points, *([] if trace.last is None else [trace.last])]:
        if not _same(loss, losses[step]) or not skipped <= count <= step + 1:
            yield f"parts.tally.tracer has another loss, or another count of skipped steps, at step {step}"
        skipped = count
    if trace.last is not None and trace.last[3] != tally.skipped_steps:
        yield "parts.tally.tracer.last counts other skipped steps"


def _in_best(saved: Saved, epochs: list[EpochResult]) -> Iterator[str]:
    values = [epoch.value for epoch in epochs]
    metric = saved.metrics[0]
    best, expected = saved.best, metric.best(values)
    if best.value != expected or (best.step is None) != (best.value is None):
        yield f"best is {best.value} at step {best.step}, and the epochs have {expected}"
    if best.step is not None and not 0 < best.step <= saved.progress.step:
        yield f"best.step is {best.step} after {saved.progress.step} steps"
    early = saved.parts.early_stop
    if early is None:
        return
    waited = 0 if expected is None else len(values) - 1 - values.index(expected)
    if (early.best if early.best != NO_VALUE else None, early.waited) != (expected, waited):
        yield f"parts.early_stop has waited {early.waited} epochs for more than {early.best}; the epochs say {waited}"


def _in_watch(watch: Watch, losses: list[float], *, rolled_back: bool) -> Iterator[str]:
    if (watch.diverged_step is None) != (watch.reason is None):
        yield "parts.watch has a reason for a divergence that was not, or none for one that was"
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    for name in ("first_nonfinite_loss_step", "diverged_step", "run_start"):
        step = getattr(watch, name)
        if step is not None and step >= len(losses):
            yield f"parts.watch.{name} is {step} after {len(losses)} steps"
    if watch.diverged_step is not None or rolled_back:
        return
    if watch.first_nonfinite_loss_step != (bad[0] if bad else None):
        yield f"parts.watch.first_nonfinite_loss_step is {watch.first_nonfinite_loss_step}, which the losses deny"
    start = len(losses)
    while start and not math.isfinite(losses[start - 1]):
        start -= 1
    if watch.run_start != (start if start < len(losses) else None):
        yield f"parts.watch.run_start is {watch.run_start}, which the losses deny"


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


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
