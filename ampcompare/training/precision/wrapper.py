"""A precision around another one, for what varies an arm without being one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.training.precision.base import Precision, StepOutcome

__all__ = ["PrecisionWrapper"]


class PrecisionWrapper(Precision):
    """Passes every call of an update to the precision inside; a subclass overrides what it varies.

    CUDA graphs are not passed on: a wrapper that supports them overrides `unrecordable`, `recording` and `repeated`.

    Args:
        inner: the precision that does the work; it may be prepared already.
    """

    def __init__(self, inner: Precision) -> None:
        self.inner = inner
        self.key = inner.key  # type: ignore[misc]  # checkpoints hold the state of the inner precision
        self.half_dtype = inner.half_dtype
        self.engine = inner.engine
        self.effective = inner.effective
        self.state_dtype = inner.state_dtype
        self.added_state = inner.added_state
        self.kept_fp32 = inner.kept_fp32
        self.emulated = inner.emulated

    def expect_losses(self, count: int) -> None:
        self.inner.expect_losses(count)

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prepared = self.inner.prepare(models, optimizers)
        self.kept_fp32 = self.inner.kept_fp32
        self.notes = self.inner.notes
        return prepared

    def autocast(self) -> AbstractContextManager[None]:
        return self.inner.autocast()

    def suspended(self) -> AbstractContextManager[None]:
        return self.inner.suspended()

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self.inner.backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return self.inner.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        return self.inner.step(*optimizers)

    def step_apart(self, optimizer: Optimizer, waiting: Sequence[Optimizer]) -> StepOutcome:
        return self.inner.step_apart(optimizer, waiting)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def loss_scales(self) -> tuple[float, ...]:
        return self.inner.loss_scales()

    def weights_replaced(self) -> None:
        self.inner.weights_replaced()
