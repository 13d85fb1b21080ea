"""Guards of the order of steps: the double step, the scheduler before the optimizer, gradients that are kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampcompare.guards.detector import Detector
from ampcompare.guards.facts import parameters_of
from ampcompare.guards.place import Place, user_place

__all__ = ["GradientsKept", "SchedulerFirst", "StepTwice"]


class StepTwice(Detector):
    """Both ways of stepping one optimizer, with no backward pass between them."""

    name = "step-twice"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Optimizer: how many backward passes there had been at its last step by a scaler, and by itself.
        self._by_scaler: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._by_itself: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def attempt(self, optimizer: Any, scaler: Any) -> None:
        now = self.facts.backwards
        own, other = (self._by_itself, self._by_scaler) if scaler is None else (self._by_scaler, self._by_itself)
        if now and other.get(optimizer) == now:
            again, first = ("optimizer.step()", "scaler.step(optimizer)")
            if scaler is not None:
                again, first = first, again
            self.report(f"{again} again after {first}, on the same gradients")
        own[optimizer] = now


@dataclass
class _Schedule:
    """Calls of one scheduler's `step`.

    Attributes:
        early: lines that called it before the first step of the optimizer.
        waiting: the line of the last call and the backward passes so far, where gradients were waiting for a step.
        wrong: lines known to come before the optimizer's step.
    """

    early: set[Place] = field(default_factory=set)
    waiting: tuple[Place, int] | None = None
    wrong: set[Place] = field(default_factory=set)


class SchedulerFirst(Detector):
    """A line that calls the scheduler between backward pass and step, or in a loop whose steps come after it.

    Reported at the second call from that line, so that catching up on a resumed schedule is no mistake.
    """

    name = "scheduler-first"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._schedules: weakref.WeakKeyDictionary[Any, _Schedule] = weakref.WeakKeyDictionary()
        # Optimizer: how many backward passes there had been at the end of its last step.
        self._stepped_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def after_block(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if will_skip(optimizer):  # a call of `step` that nobody sees
                self._stepped_at.setdefault(optimizer, self.facts.backwards)

    def schedule(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return
        known = self._schedules.setdefault(scheduler, _Schedule())
        place = user_place()
        stepped_at = self._stepped_at.get(optimizer)
        if place in known.wrong or (stepped_at is not None and place in known.early):
            self.report("scheduler.step() runs before optimizer.step()", place)
            return
        waits = self.facts.backwards > (stepped_at or 0)
        if stepped_at is None and not waits:
            known.early.add(place)
        known.waiting = (place, self.facts.backwards) if waits else None

    def attempt(self, optimizer: Any, scaler: Any) -> None:
        for schedule, known in self._schedules.items():
            if known.waiting is not None and getattr(schedule, "optimizer", None) is optimizer:
                place, backwards = known.waiting
                known.waiting = None
                if backwards == self.facts.backwards:
                    known.wrong.add(place)
        self._stepped_at[optimizer] = self.facts.backwards

    def after_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        self._stepped_at[optimizer] = self.facts.backwards  # a closure makes its backward passes inside the step


class GradientsKept(Detector):
    """A step that follows a skipped one, with gradients that nobody cleared in between.

    After a skipped step, and only then, the gradients are looked at when the next backward passes begin.
    """

    name = "gradients-kept"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Optimizers that skipped a step, and those of them to whose gradients a later pass has added.
        self._skipped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()

    def backward(self, losses: Any, seeds: Any) -> None:
        if self._skipped and not self.facts.blocks:
            self._look()

    def block(self, optimizers: Sequence[Any]) -> None:
        if self._skipped:
            self._look()

    def after_block(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._complain(optimizer)
            if will_skip(optimizer):
                self._skipped.add(optimizer)

    def attempt(self, optimizer: Any, scaler: Any) -> None:
        if scaler is not None:
            self._complain(optimizer)

    def after_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        if scaler is not None and not applied:
            self._skipped.add(optimizer)

    def _look(self) -> None:
        for optimizer in list(self._skipped):
            if will_skip(optimizer):  # several passes may add up before the step that is to be skipped
                continue
            if all(is_finite(parameter.grad) for parameter in _cleared_by_the_user(optimizer)):
                self._skipped.discard(optimizer)
            else:
                self._added.add(optimizer)

    def _complain(self, optimizer: Any) -> None:
        if optimizer in self._skipped and optimizer in self._added:
            self.report("the gradients of a skipped step were not cleared before this one")
            self._skipped.discard(optimizer)
        self._added.discard(optimizer)


def is_finite(gradient: Tensor | None) -> bool:
    """Tell whether a gradient holds neither infinities nor NaN; it waits for the device."""
    return gradient is None or gradient.is_sparse or bool(gradient.isfinite().all())


def _cleared_by_the_user(optimizer: Any) -> Iterable[Tensor]:
    """Return the parameters whose gradients Apex does not drop by itself, as it does those of master weights."""
    stash: Any = getattr(optimizer, "_amp_stash", None)
    if getattr(stash, "all_fp32_from_fp16_params", None):
        full: Iterable[Tensor] = stash.all_fp32_from_fp32_params
        return full
    return parameters_of(optimizer)


def will_skip(optimizer: Any) -> bool:
    """Tell whether Apex has turned the next `optimizer.step()` into a skip, as far as the host knows."""
    return bool(getattr(getattr(optimizer, "_amp_stash", None), "already_patched", False))
