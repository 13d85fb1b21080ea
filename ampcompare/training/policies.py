"""When a run stops early, goes back, or drops an update: one class for each policy, behind one protocol."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.lists import copy_tensors_by_dtype, largest_magnitudes
from ampcompare.base.tensors.sharded import local_part
from ampcompare.base.tensors.skippable_step import undo_skipped_step_on_host
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.assemble import TrainingAssembly
from ampcompare.training.ema import ModelEma
from ampcompare.training.precision.base import (
    FixedOutcome,
    Precision,
    PrecisionWrapper,
    StepOutcome,
    owned_params,
)

NO_VALUE = -1.0  # what older checkpoints hold as the best value before the first evaluation


class Policy:
    """A rule of a run. The defaults do nothing; what a policy decides must be equal on all ranks.

    Attributes:
        name: key of its state in a checkpoint; None for a policy without state.
        end_reason: why training ends before its last epoch in a good state; None while it continues.
    """

    name: ClassVar[str | None] = None
    end_reason: str | None = None

    def begin(self, step: int) -> None:
        """Start at `step` updates, before the first update of this process."""

    def apply_and_has_changed_weights(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Apply the rule to a drained block of steps; return whether it changed weights and loss scales."""
        return False

    def apply_to_epoch(self, result: EpochResult) -> None:
        """Apply the rule to the evaluation of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run continues from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def are_weights_finite(models: Sequence[nn.Module]) -> bool:
    """Return whether every parameter, or this rank's part of it, is finite; waits for the device once."""
    params = [local_part(param.detach()) for model in models for param in model.parameters()]
    params = [param for param in params if param.numel()]
    return not params or bool(largest_magnitudes(params).isfinite().all())


class DivergenceDetector(Policy):
    """Finds out whether a run has diverged, block by block, on all ranks alike.

    A non-finite loss alone is not divergence: under dynamic scaling its step is skipped and the weights stay good. So
    many consecutive ones are, and non-finite weights. `diverged_step` is the first bad step; `is_final` says that a
    limit was passed, from which a run does not recover.
    """

    name = "watch"
    STATE = ("first_nonfinite_loss_step", "diverged_step", "reason", "run_start")

    def __init__(
        self,
        patience: int,
        models: Sequence[nn.Module],
        any_rank: Callable[[bool], bool] = bool,
        *,
        stops: bool = True,
    ) -> None:
        self.patience = patience
        self._models = models
        self._any_rank = any_rank
        self._stops = stops
        self.is_final = False
        self.first_nonfinite_loss_step: int | None = None
        self.diverged_step: int | None = None
        self.reason: str | None = None
        self.run_start: int | None = None

    @property
    def ends_run(self) -> bool:
        """Whether the run ends here as diverged."""
        return self.is_final or (self._stops and self.diverged_step is not None)

    def end_run_as_diverged(self, step: int, reason: str) -> None:
        """Mark the run as diverged for another reason, and permanently."""
        self.diverged_step = step
        self.reason = reason
        self.is_final = True

    def note_recovery(self) -> None:
        """Record that the run is back in a good state; the first non-finite loss stays recorded."""
        self.diverged_step = self.reason = self.run_start = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was found: plain values."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.STATE:
            setattr(self, name, state[name])

    def apply_and_has_changed_weights(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Check the losses of a block and the weights after it; never changes them."""
        if self.diverged_step is not None:
            return False
        bad_run_start: int | None = None
        first_applied_bad: int | None = None
        for record in records:
            if math.isfinite(record.loss):
                self.run_start = None
                continue
            if self.first_nonfinite_loss_step is None:
                self.first_nonfinite_loss_step = record.step
            if self.run_start is None:
                self.run_start = record.step
            if any(record.applied) and first_applied_bad is None:
                first_applied_bad = record.step
            if record.step - self.run_start + 1 >= self.patience and bad_run_start is None:
                bad_run_start = self.run_start
        if self._any_rank(not are_weights_finite(self._models)):
            # The weights went bad at the first applied step with a bad loss; without one, by the end of the block.
            start = self.run_start if self.run_start is not None else first_applied_bad
            self.diverged_step = start if start is not None else records[-1].step
            self.reason = "non-finite weights"
        elif bad_run_start is not None:
            self.diverged_step = bad_run_start
            self.reason = f"{self.patience} non-finite losses in a row"
        return False


class EarlyStop(Policy):
    """Decides after each evaluation whether training may end, by the metric of the weights (not of their EMA).

    It ends after `patience` consecutive epochs without a better value, or at the target, as it is shown.
    """

    name = "early_stop"

    def __init__(self, patience: int | None, target: float | None, metric: Metric) -> None:
        self._patience = patience
        self._target = target
        self._metric = metric
        self._best: float | None = None
        self._waited = 0
        self.end_reason: str | None = None

    def apply_to_epoch(self, result: EpochResult) -> None:
        """Compare the value of an epoch with the target and with the best so far."""
        metric, value = self._metric, result.value
        improved = metric.is_better(value, self._best)
        self._best, self._waited = (value, 0) if improved else (self._best, self._waited + 1)
        if self._target is not None and not metric.is_better(self._target, metric.factor * value):
            unit = f" {metric.unit}" if metric.unit else ""
            self.end_reason = (
                f"{metric.name} of {metric.value_text(value)} reached {self._target:g}{unit} after epoch "
                f"{result.epoch}"
            )
        elif self._patience is not None and self._waited >= self._patience:
            self.end_reason = f"no better {metric.name} for {self._waited} epochs, after epoch {result.epoch}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and for how many epochs it has been the best."""
        return {"best": self._best, "waited": self._waited, "reason": self.end_reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best"]
        self._best = None if best is None or best == NO_VALUE else float(best)
        self._waited = int(state["waited"])
        self.end_reason = state["reason"]


class LossScaleLimits(Policy):
    """Ends a run as diverged if its loss scale collapses: each overflow lowers the scale, and no step is applied."""

    name = "limits"

    def __init__(
        self,
        divergence: DivergenceDetector,
        stop_loss_scale: float | None = None,
        max_skipped: int | None = None,
    ) -> None:
        self._divergence = divergence
        self._stop_loss_scale = stop_loss_scale
        self._max_skipped = max_skipped
        self._skipped = 0

    def apply_and_has_changed_weights(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Check each step of a block against the limits; never changes weights."""
        for record in records:
            reason = self._find_exceeded_limit(record)
            if reason is not None:
                self._divergence.end_run_as_diverged(record.step, reason)
                break
        return False

    def _find_exceeded_limit(self, record: StepRecord) -> str | None:
        self._skipped = 0 if all(record.applied) else self._skipped + 1
        if self._max_skipped is not None and self._skipped > self._max_skipped:
            return f"{self._skipped} skipped steps in a row, more than --max-consecutive-skips {self._max_skipped}"
        lowest = min(record.loss_scales, default=None)
        if lowest is not None and self._stop_loss_scale is not None and lowest < self._stop_loss_scale:
            return f"loss scale {lowest:g} is below --fail-below-loss-scale {self._stop_loss_scale:g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consecutive skipped steps."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skipped = int(state["skipped"])


class SkippingPrecision(PrecisionWrapper):
    """A prepared precision that drops updates with a non-finite loss on any rank.

    A scaler inside still sees the gradients of a dropped update, and lowers its scale. Buffers that the batch has
    changed, such as running statistics, are restored. Each step waits for its losses.
    """

    def __init__(
        self, inner: Precision, models: Sequence[nn.Module], any_rank: Callable[[bool], bool] = bool
    ) -> None:
        super().__init__(inner)
        self._any_rank = any_rank
        self._losses: list[Tensor] = []
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._kept: list[Tensor] | None = None

    def autocast(self) -> AbstractContextManager[None]:
        if self._kept is None:  # not in the constructor: a checkpoint may still replace the buffers then
            self._kept = [buffer.clone() for buffer in self._buffers]
        return self.inner.autocast()

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        self._losses.append(loss.detach())

    @torch.no_grad()
    def step(self, *optimizers: Optimizer) -> StepOutcome:
        finite = all(bool(loss.isfinite().all()) for loss in self._losses)
        self._losses.clear()
        kept = self._kept
        if not self._any_rank(not finite):
            if kept is not None:
                copy_tensors_by_dtype(kept, self._buffers)
            return self.inner.step(*optimizers)
        if kept is not None:
            copy_tensors_by_dtype(self._buffers, kept)
        for optimizer in optimizers:
            for param in self.inner.unscale(optimizer):
                param.grad = None  # an optimizer skips parameters without a gradient
        return FixedOutcome((False,) * len(optimizers), self.inner.step(*optimizers).loss_scales)


class StepStateSnapshot:
    """Copies of all that a step changes: weights, masters, buffers, optimizer state, loss scales, EMA.

    State of an optimizer is kept by the index of its parameter, because Apex replaces parameters by masters in the
    first backward pass only; a snapshot from before it fills the masters from the model's weights, as Apex does.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        average: ModelEma | None = None,
    ) -> None:
        self._precision = precision
        self._average = average
        self._optimizers = list(optimizers)
        self._tensors: list[Tensor] = [tensor for model in models for tensor in model.parameters()]
        self._tensors += [tensor for model in models for tensor in model.buffers()]
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        for optimizer in optimizers:
            undo_skipped_step_on_host(optimizer)
        self._owned = [[param.detach().clone() for param in owned_params(each)] for each in optimizers]
        self._states = [
            [_clone_of_state(each.state.get(param, {})) for param in owned_params(each)]
            for each in optimizers
        ]
        self._scaling = copy.deepcopy(precision.state_dict())
        self._averaged = None if average is None else copy.deepcopy(average.state_dict())

    @torch.no_grad()
    def restore_state(self) -> None:
        """Restore everything; the snapshot can be restored again."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for optimizer, values, states in zip(self._optimizers, self._owned, self._states, strict=True):
            undo_skipped_step_on_host(optimizer)
            for param, value, state in zip(owned_params(optimizer), values, states, strict=True):
                param.copy_(value)
                optimizer.state.pop(param, None)
                if state:
                    optimizer.state[param] = _clone_of_state(state)
        self._precision.load_state_dict(copy.deepcopy(self._scaling))
        self._precision.weights_replaced()
        if self._average is not None and self._averaged is not None:
            self._average.load_state_dict(self._averaged)


def _clone_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        for key, value in state.items()
    }


class Rollback(Policy):
    """Takes a snapshot every few good steps, and restores the last one after divergence, a limited number of times.

    `steps` has the updates made at each rollback; the count of updates itself is not set back.
    """

    name = "rollback"

    def __init__(
        self,
        take: Callable[[], StepStateSnapshot],
        divergence: DivergenceDetector,
        every: int,
        max_rollbacks: int,
    ) -> None:
        self._take = take
        self._divergence = divergence
        self._every = every
        self._max_rollbacks = max_rollbacks
        self._snapshot_step = 0
        self._snapshot: StepStateSnapshot | None = None
        self.steps: list[int] = []

    def begin(self, step: int) -> None:
        """Take the first snapshot: the state that the run starts or resumes from."""
        self._take_snapshot_if_due(step)

    def apply_and_has_changed_weights(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Restore the last snapshot if the run has diverged, else take one when it is due."""
        if self._divergence.is_final:
            return False
        if self._divergence.diverged_step is None:
            # A non-finite last loss may come from weights that are about to go bad.
            if math.isfinite(records[-1].loss):
                self._take_snapshot_if_due(step)
            return False
        if self._snapshot is None or len(self.steps) >= self._max_rollbacks:
            return False
        self._snapshot.restore_state()
        self.steps.append(step)
        self._divergence.note_recovery()
        return True

    def _take_snapshot_if_due(self, step: int) -> None:
        if self._snapshot is None or step - self._snapshot_step >= self._every:
            self._snapshot = self._take()
            self._snapshot_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the rollbacks so far; the last good state of a resumed run is its checkpoint."""
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = [int(step) for step in state["steps"]]


def make_policies(
    config: RunConfig, assembly: TrainingAssembly, divergence: DivergenceDetector
) -> list[Policy]:
    """Return the policies that a configuration asks for; each applies its rule to what those before it left."""
    recipe = config.recipe
    policies: list[Policy] = [divergence]
    if recipe.early_stop is not None or recipe.target is not None:
        policies.append(EarlyStop(recipe.early_stop, recipe.target, assembly.task.metrics[0]))
    if config.stop_loss_scale is not None or config.max_skipped is not None:
        policies.append(LossScaleLimits(divergence, config.stop_loss_scale, config.max_skipped))
    if config.on_nan == "rollback":
        take = functools.partial(
            StepStateSnapshot, assembly.replicas, assembly.optimizers, assembly.precision, assembly.average
        )
        policies.append(Rollback(take, divergence, config.rollback_every, config.max_rollbacks))
    return policies
