"""Guards of the order of steps: the double step, the step by scaled gradients, gradients that are kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.base.location import Location, user_location
from ampcompare.guards.detection.detector import Detector, guard_of_name
from ampcompare.guards.detection.script_state import (
    first_parameter_with_gradient,
    parameters_of_optimizer,
    will_apex_skip_step,
)

if TYPE_CHECKING:
    from torch import Tensor


class StepBothWays(Detector):
    """Both ways of stepping one optimizer, with no backward pass between them."""

    guard = guard_of_name("step-twice")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Optimizer: how many backward passes there had been at its last step by a scaler, and by itself.
        self._by_scaler: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._by_itself: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        now = self.facts.backwards
        this_way, other_way = self._by_itself, self._by_scaler
        if scaler is not None:
            this_way, other_way = other_way, this_way
        if now and other_way.get(optimizer) == now:
            again, first = ("optimizer.step()", "scaler.step(optimizer)")
            if scaler is not None:
                again, first = first, again
            self.report(f"{again} again after {first}, on the same gradients")
        this_way[optimizer] = now


class StepWithScaledGradients(Detector):
    """A step of an optimizer by itself, with gradients that a scaler has scaled and nothing has written to since.

    A backward pass writes to a gradient once at most, and the first one makes it. It is reported when the next pass
    begins: a step by the scaler on the same gradients makes it a double step.
    """

    guard = guard_of_name("step-unscaled")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # passes at its last step
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # lines of such steps
        self._waiting: weakref.WeakKeyDictionary[Any, Location] = weakref.WeakKeyDictionary()

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        self.at_guard_removal()

    def at_guard_removal(self) -> None:
        for line in self._waiting.values():
            self.report("optimizer.step() by gradients that the GradScaler has scaled", line)
        self._waiting.clear()

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        facts = self.facts
        passes = facts.backwards - self._stepped.get(optimizer, 0)
        if scaler is None and not facts.scaler_stepping and passes and facts.holds_scaled_gradients():
            parameter = first_parameter_with_gradient(parameters_of_optimizer(optimizer))
            is_written = parameter is None or parameter.grad is None or parameter.grad._version >= passes
            if not is_written and optimizer not in facts.unscaled:
                self._waiting[optimizer] = user_location()
        elif scaler is not None:
            self._waiting.pop(optimizer, None)
        self._stepped[optimizer] = facts.backwards


class GradientsKeptAfterSkip(Detector):
    """A step that follows a skipped one, with gradients that were not cleared in between.

    After a skipped step, and only then, the gradients are read when the next backward passes begin.
    """

    guard = guard_of_name("gradients-kept")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Optimizers that skipped a step, and those of them whose gradients a later pass has added to.
        self._skipped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before_blocks: list[int] = []  # backward passes when each `scale_loss` block that is open began

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        if self._skipped and not self.facts.blocks:
            self._note_gradients_not_cleared()

    def at_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        self._before_blocks.append(self.facts.backwards)
        if self._skipped:
            self._note_gradients_not_cleared()

    def after_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        # it may call `torch.autograd.grad` alone
        without_pass = self.facts.backwards == self._before_blocks.pop()
        for optimizer in optimizers:
            if without_pass:
                self._added.discard(optimizer)
                continue
            self._report_kept_gradients(optimizer)
            if will_apex_skip_step(optimizer):
                self._skipped.add(optimizer)

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        if scaler is not None:
            self._report_kept_gradients(optimizer)

    def after_step_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        if scaler is not None and not applied:
            self._skipped.add(optimizer)

    def _note_gradients_not_cleared(self) -> None:
        for optimizer in list(self._skipped):
            if will_apex_skip_step(optimizer):
                continue  # several passes may add up before the step that is to be skipped
            if all(is_finite(parameter.grad) for parameter in _params_user_has_to_clear(optimizer)):
                self._skipped.discard(optimizer)
            else:
                self._added.add(optimizer)

    def _report_kept_gradients(self, optimizer: Any) -> None:
        if optimizer in self._skipped and optimizer in self._added:
            self.report("the gradients of a skipped step were not cleared before this one")
            self._skipped.discard(optimizer)
        self._added.discard(optimizer)


def is_finite(gradient: Tensor | None) -> bool:
    """Return whether a gradient has no infinities and no NaN; it waits for the device."""
    return gradient is None or gradient.is_sparse or bool(gradient.isfinite().all())


def _params_user_has_to_clear(optimizer: Any) -> Iterable[Tensor]:
    """Return the parameters whose gradients Apex does not clear itself, as it clears those of master weights."""
    stash: Any = getattr(optimizer, "_amp_stash", None)
    if getattr(stash, "all_fp32_from_fp16_params", None):
        fp32_params: Iterable[Tensor] = stash.all_fp32_from_fp32_params
        return fp32_params
    return parameters_of_optimizer(optimizer)
