"""From settings to the policies of a run, in the order in which they are applied: limits on the loss scale, skips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome
from ampcompare.precision.wrapper import PrecisionWrapper
from ampcompare.records.run import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tensors.lists import copy_by_dtype
from ampcompare.training.assemble import Assembly
from ampcompare.training.policies.divergence import DivergenceDetector
from ampcompare.training.policies.early_stop import EarlyStop
from ampcompare.training.policies.policy import Policy
from ampcompare.training.policies.rollback import Rollback

__all__ = ["ScaleLimits", "SkipNonFinite", "SkippingPrecision", "make_policies"]


class ScaleLimits(Policy):
    """Ends a run as diverged if its loss scale collapses: each overflow lowers the scale, and no step is applied.

    Args:
        divergence: records the end and its reason.
        stop_loss_scale: the run ends if a loss scale is below it; None for no floor.
        max_skipped: the run ends after more consecutive skipped steps than this; None for no maximum.
    """

    name = "limits"

    def __init__(
        self, divergence: DivergenceDetector, stop_loss_scale: float | None = None, max_skipped: int | None = None
    ) -> None:
        self._divergence = divergence
        self._stop_loss_scale = stop_loss_scale
        self._max_skipped = max_skipped
        self._skipped = 0

    @classmethod
    def from_config(cls, config: RunConfig, divergence: DivergenceDetector) -> ScaleLimits | None:
        """Return the limits of a configuration; None if it sets none."""
        if config.stop_loss_scale is None and config.max_skipped is None:
            return None
        return cls(divergence, config.stop_loss_scale, config.max_skipped)

    def after_steps(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Check each step of a block against the limits; never changes weights."""
        for record in records:
            reason = self._exceeded(record)
            if reason is not None:
                self._divergence.end(record.step, reason)
                break
        return False

    def _exceeded(self, record: StepRecord) -> str | None:
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
        """Restore what `state_dict` returned."""
        self._skipped = int(state["skipped"])


class SkipNonFinite(Policy):
    """Lets a run train with a `SkippingPrecision`.

    Args:
        models: as `prepare` returned them.
        any_rank: returns whether a flag is set on any rank.
    """

    def __init__(self, models: Sequence[nn.Module], any_rank: Callable[[bool], bool] = bool) -> None:
        self._models = models
        self._any_rank = any_rank

    @classmethod
    def from_config(cls, config: RunConfig, assembly: Assembly) -> SkipNonFinite | None:
        """Return the policy if a configuration asks for it, else None."""
        return cls(assembly.replicas, assembly.ranks.any) if config.on_nan == "skip" else None

    def wrap(self, precision: Precision) -> Precision:
        """Return a precision that drops updates with a non-finite loss."""
        return SkippingPrecision(precision, self._models, self._any_rank)


class SkippingPrecision(PrecisionWrapper):
    """A prepared precision that drops updates with a non-finite loss.

    A scaler inside still sees the gradients of a dropped update, and lowers its scale. Buffers that the batch has
    changed, such as running statistics, are restored. Each step waits for its losses.

    Args:
        inner: prepared.
        models: as `prepare` returned them.
        any_rank: returns whether a flag is set on any rank.
    """

    def __init__(self, inner: Precision, models: Sequence[nn.Module], any_rank: Callable[[bool], bool] = bool) -> None:
        super().__init__(inner)
        self._any_rank = any_rank
        self._losses: list[Tensor] = []
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._kept: list[Tensor] | None = None

    def autocast(self) -> AbstractContextManager[None]:
        if self._kept is None:  # not in the constructor: a checkpoint may still replace the buffers then
            self._kept = [buffer.clone() for buffer in self._buffers]
        return self.inner.autocast()

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        self._losses.append(loss.detach())
        return super().scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self._losses.append(loss.detach())
        super().backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    @torch.no_grad()
    def step(self, *optimizers: Optimizer) -> StepOutcome:
        finite = all(bool(loss.isfinite().all()) for loss in self._losses)
        self._losses.clear()
        kept = self._kept
        if not self._any_rank(not finite):
            if kept is not None:
                copy_by_dtype(kept, self._buffers)
            return self.inner.step(*optimizers)
        if kept is not None:
            copy_by_dtype(self._buffers, kept)
        for optimizer in optimizers:
            for param in self.inner.unscale(optimizer):
                param.grad = None  # an optimizer skips parameters without a gradient
        return FixedOutcome((False,) * len(optimizers), self.inner.step(*optimizers).loss_scales)


def make_policies(config: RunConfig, assembly: Assembly, divergence: DivergenceDetector) -> list[Policy]:
    """Return the policies that a configuration asks for; each applies its rule to what those before it left.

    Args:
        divergence: finds divergence first; a limit may add to it, and a rollback may clear it.
    """
    optional = (
        EarlyStop.from_config(config, assembly.task.metrics[0]),
        ScaleLimits.from_config(config, divergence),
        Rollback.from_config(config, assembly, divergence),
        SkipNonFinite.from_config(config, assembly),
    )
    return [divergence, *(policy for policy in optional if policy is not None)]
