"""The precision of a loop whose steps are seen by an observer, which says when they are enough."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome


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
        prepared, stepped = super()._prepare(models, optimizers)
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
