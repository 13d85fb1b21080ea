"""The policy `skip`: an update whose loss is not finite on any rank is dropped, by every backend alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome

__all__ = ["SkipNonFinite"]


class SkipNonFinite(Precision):
    """A backend that drops updates with a non-finite loss; all else is done by the one inside.

    A scaler inside still sees the gradients of a dropped update, and lowers its scale. Buffers that the batch has
    spoiled, such as running statistics, go back to what they were. Each step waits for its losses.

    Args:
        inner: prepared.
        models: as `prepare` returned them.
        any_rank: whether a flag is set in any of the processes that train together.
    """

    key = "precision"

    def __init__(self, inner: Precision, models: Sequence[nn.Module], any_rank: Callable[[bool], bool] = bool) -> None:
        self.inner = inner
        self.half_dtype = inner.half_dtype
        self.engine = inner.engine
        self._any_rank = any_rank
        self._losses: list[Tensor] = []
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._kept: list[Tensor] | None = None

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        return self.inner.prepare(models, optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        if self._kept is None:  # before the first forward pass, and after all that a checkpoint brings
            self._kept = [buffer.clone() for buffer in self._buffers]
        return self.inner.autocast()

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        self._losses.append(loss.detach())
        return self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        self._losses.append(loss.detach())
        self.inner.backward(loss, optimizers, **options)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return self.inner.unscale(optimizer)

    @torch.no_grad()
    def step(self, *optimizers: Optimizer) -> StepOutcome:
        finite = all(bool(loss.isfinite().all()) for loss in self._losses)
        self._losses.clear()
        kept = self._kept or []
        if not self._any_rank(not finite):
            _copy(self._buffers, kept)
            return self.inner.step(*optimizers)
        _copy(kept, self._buffers)
        for optimizer in optimizers:
            for param in self.inner.unscale(optimizer):
                param.grad = None  # an optimizer passes over parameters without gradient
        return FixedOutcome((False,) * len(optimizers), self.inner.step(*optimizers).loss_scales)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def loss_scales(self) -> tuple[float, ...]:
        return self.inner.loss_scales()

    def weights_replaced(self) -> None:
        self.inner.weights_replaced()


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources and targets:
        torch._foreach_copy_(targets, sources)
