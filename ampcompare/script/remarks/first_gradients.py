"""Optimizers whose first steps get no gradients, so that nothing is trained whatever the arm.

They have other weights than those the loss is computed with, or what reaches their weights is zero: a loss behind
`argmax`, gradients cleared before the step, a scale that all of them underflow at.
"""

import weakref
from typing import Any

from torch import Tensor, nn

from ampcompare.base.formatting import format_count
from ampcompare.base.location import user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.training.precision.base import owned_params

STEPS = 2  # of an optimizer, which a preflight reaches
PLAIN = (Tensor, nn.Parameter)


class MissingFirstGradientsWatch:
    """Notes, behind its second step, an optimizer that has got no gradient, or zeros alone."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        # by optimizer: steps without a gradient other than zero, from the first one on; None once that is settled
        self._without: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._has_gradients = False  # of the step that runs
        self._noted: set[str] = set()

    def follow(self, steps: OptimizerStepEvents) -> None:
        """Look at the first steps of each optimizer, before them and behind them, where a closure has run."""
        steps.call_before_each(self._before_step)
        steps.call_after_each(self._after_step)

    def _before_step(self, optimizer: Any) -> None:
        if self._without.get(optimizer, 0) is not None:
            self._has_gradients = has_gradient_other_than_zero(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        steps = self._without.get(optimizer, 0)
        if steps is None:
            return
        if self._has_gradients or has_gradient_other_than_zero(optimizer):
            self._without[optimizer] = None
            return
        self._without[optimizer] = steps + 1
        if steps + 1 == STEPS:
            self._without[optimizer] = None
            self._note_optimizer_without_gradients(optimizer)

    def _note_optimizer_without_gradients(self, optimizer: Any) -> None:
        kind, weights = type(optimizer).__name__, owned_params(optimizer)
        count = format_count(len(weights), "weight")
        if not any(param.requires_grad for param in weights):
            what = f"all {count} of {kind} are frozen in its first {STEPS} steps, which change nothing"
        elif all(param.grad is None for param in weights):
            what = (
                f"{kind} got no gradient for any of its {count} in its first {STEPS} steps: the loss does not depend "
                "on them, as where the model was copied or made again behind the optimizer, or they were cleared"
            )
        else:
            what = (
                f"all gradients of the {count} of {kind} are zero in its first {STEPS} steps, so that it learns "
                "nothing: see what lies between them and the loss"
            )
        text = f"{what} ({user_location()})"
        if text not in self._noted:
            self._noted.add(text)
            self._rows.add_rounding_remark(text)


def has_gradient_other_than_zero(optimizer: Any) -> bool:
    """Return whether one of an optimizer's gradients has an element other than zero, or is of an unknown kind."""
    return any(_is_other_than_zero(param.grad) for param in owned_params(optimizer))


def _is_other_than_zero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    if type(gradient) not in PLAIN:  # of a library, which may be a part of one
        return True
    return bool((gradient._values() if gradient.is_sparse else gradient).any())
