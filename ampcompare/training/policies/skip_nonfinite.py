"""The policy `skip`: an update whose loss is not finite on any rank is dropped, by every backend alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome
from ampcompare.precision.wrapper import PrecisionWrapper
from ampcompare.settings.config import RunConfig
from ampcompare.tensors.lists import copy_by_dtype
from ampcompare.training.assemble import Assembly
from ampcompare.training.policies.policy import Policy

__all__ = ["SkipNonFinite", "SkippingPrecision"]


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
