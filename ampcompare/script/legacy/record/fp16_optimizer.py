"""Record the two `FP16_Optimizer` classes: of `apex.fp16_utils`, and of 2018, now in `apex.contrib.optimizers`."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from ampcompare.guards.events import Subscriptions
from ampcompare.script.legacy.record.rows import Rows, value_of

__all__ = ["record_fp16_optimizers"]


def record_fp16_optimizers(rows: Rows, events: Subscriptions) -> None:
    """Record what goes through all objects of both classes from now on, ampcompare's or the real ones."""
    kind, hooks = importlib.import_module("apex.fp16_utils").FP16_Optimizer, _Hooks(rows)
    events.wrap(kind, "backward", hooks.backward)
    events.wrap(kind, "update_master_grads", hooks.update_master_grads)
    events.wrap(kind, "step", hooks.step)
    try:
        kind = importlib.import_module("apex.contrib.optimizers.fp16_optimizer").FP16_Optimizer
    except ImportError:  # a build of the real Apex without it
        return
    hooks = _Hooks(rows)
    events.wrap(kind, "backward", hooks.backward)
    events.wrap(kind, "_update_scale", hooks.update_scale)


class _Hooks:
    """Stands around the methods of one class.

    That of `apex.fp16_utils` checks the gradients in `update_master_grads`, and uses them in `step`; that of 2018
    does both in `step`, under a static scale too, which calls `_update_scale` once, at its end.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._numbers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        # Losses whose gradients were not yet checked for overflow.
        self._losses: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def backward(self, original: Any, optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a loss."""
        self._known(optimizer)
        self._losses.setdefault(optimizer, []).append(value_of(loss))
        return original(optimizer, loss, *args, **kwargs)

    def update_master_grads(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the losses; Apex checks for overflow under a dynamic scale only."""
        before = _scale(optimizer)
        result = original(optimizer, *args, **kwargs)
        self._add_losses(optimizer, before, bool(optimizer.overflow) if optimizer.dynamic_loss_scale else None)
        return result

    def step(self, original: Any, optimizer: Any, closure: Any = None) -> Any:
        """Record a step; a closure is called again until its gradients are finite."""
        applied = closure is not None or not optimizer.overflow
        result = original(optimizer, closure)
        self._rows.add_step(self._known(optimizer)[0], applied)
        return result

    def update_scale(self, original: Any, optimizer: Any, skip: Any) -> Any:
        """Record the losses and the step."""
        number, _ = self._known(optimizer)
        before = _scale(optimizer)
        result = original(optimizer, skip)
        self._add_losses(optimizer, before, bool(skip))
        self._rows.add_step(number, not skip)
        return result

    def _known(self, optimizer: Any) -> tuple[int, int]:
        """Return the numbers of the optimizer and of its losses; the first call records both."""
        numbers = self._numbers.get(optimizer)
        if numbers is None:
            number, _ = self._rows.number(optimizer.optimizer)
            numbers = self._numbers[optimizer] = number, self._rows.new_loss_id()
            names = {number: type(optimizer.optimizer).__name__}
            dynamic = bool(optimizer.dynamic_loss_scale)
            self._rows.add_initialize("FP16_Optimizer", names, [_scale(optimizer)], [dynamic])
        return numbers

    def _add_losses(self, optimizer: Any, before: float, overflow: bool | None) -> None:
        """Record the losses since the last check; the last one carries its outcome."""
        number, loss_id = self._known(optimizer)
        losses = self._losses.pop(optimizer, [])
        for index, loss in enumerate(losses, 1):
            last = index == len(losses)
            self._rows.add_backward(
                loss,
                loss_id,
                (before, _scale(optimizer) if last else before),
                overflow if last else None,
                [number],
                [number] if last and overflow else [],
            )


def _scale(optimizer: Any) -> float:
    scaler = getattr(optimizer, "loss_scaler", None)  # the class of 2018 has none
    return float(optimizer.cur_scale if scaler is None else scaler.loss_scale())
