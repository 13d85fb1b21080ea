"""The precision of a loop whose steps are seen by an observer, which says when they are enough."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome

MAX_KEPT = 2**20  # elements of a buffer whose fp32 values are kept


class StepsDone(Exception):
    """All steps that were asked for are made; it ends the loop."""


class StepObserver:
    """Sees the steps of a loop; what a kind of observer does not look at passes by."""

    @property
    def is_over(self) -> bool:
        """Whether all steps are made."""
        return False

    def begin(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Begin with what an arm has prepared: the models and optimizers inside of what a library puts around them."""

    def see_cast_buffers(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Look at the buffers that an arm has cast to 16 bits, each with what it was in fp32."""

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass begins."""

    def see_update(self, outcome: StepOutcome, optimizers: Sequence[Optimizer]) -> None:
        """Look at an update that was made, or skipped."""


class WatchedPrecision(PrecisionWrapper):
    """Shows the steps of a loop to an observer, and raises `StepsDone` after the last one."""

    def __init__(self, inner: Precision, observer: StepObserver) -> None:
        super().__init__(inner)
        self.observer = observer

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        exact = [
            (module, name, buffer.detach().clone())
            for module in (part for model in models for part in model.modules())
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype is torch.float32 and buffer.numel() <= MAX_KEPT
        ]
        prepared, stepped = super()._prepare(models, optimizers)
        now = [(module._buffers.get(name), before) for module, name, before in exact]
        self.observer.see_cast_buffers(
            [
                (buffer, before)
                for buffer, before in now
                if buffer is not None and buffer.dtype in HALF_DTYPES and buffer.shape == before.shape
            ]
        )
        self.observer.begin(
            [getattr(model, "_forward_module", model) for model in prepared],
            [_optimizer_with_hooks(one) for one in stepped],
        )
        return prepared, stepped

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        self.observer.see_loss(loss)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = self.inner.step(*optimizers)
        self.observer.see_update(outcome, optimizers)
        if self.observer.is_over:
            raise StepsDone
        return outcome


def _optimizer_with_hooks(stepped: Any) -> Optimizer:
    """Return what takes hooks on its step: the wrapper of a library may take none, and hold an optimizer."""
    found: Optimizer = stepped if hasattr(stepped, "_optimizer_step_pre_hooks") else stepped.optimizer
    return found
