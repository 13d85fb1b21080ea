"""Record the two `FP16_Optimizer` classes: of `apex.fp16_utils`, and of 2018, now in `apex.contrib.optimizers`."""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any

from ampcompare.script.legacy.record.rows import Rows, value_of

__all__ = ["record_fp16_optimizers"]


def record_fp16_optimizers(rows: Rows) -> None:
    """Record what goes through all objects of both classes from now on, ampcompare's or the real ones."""
    _Hooks(rows).watch_two_step(importlib.import_module("apex.fp16_utils").FP16_Optimizer)
    try:
        contrib = importlib.import_module("apex.contrib.optimizers.fp16_optimizer")
    except ImportError:  # a build of the real Apex without it
        return
    _Hooks(rows).watch_one_step(contrib.FP16_Optimizer)


class _Hooks:
    """Wrappers of the methods of one class."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._numbers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        # Losses whose gradients were not yet checked for overflow.
        self._losses: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def watch_two_step(self, kind: Any) -> None:
        """Watch `apex.fp16_utils.FP16_Optimizer`: `update_master_grads` checks the gradients, `step` uses them."""
        check, apply = kind.update_master_grads, kind.step

        @functools.wraps(check)
        def update_master_grads(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = _scale(optimizer)
            result = check(optimizer, *args, **kwargs)
            # Apex checks for overflow under a dynamic scale only.
            self._add_losses(optimizer, before, bool(optimizer.overflow) if optimizer.dynamic_loss_scale else None)
            return result

        @functools.wraps(apply)
        def step(optimizer: Any, closure: Any = None) -> Any:
            # A closure is called again until its gradients are finite.
            applied = closure is not None or not optimizer.overflow
            result = apply(optimizer, closure)
            self._rows.add_step(self._known(optimizer)[0], applied)
            return result

        kind.backward, kind.update_master_grads, kind.step = self._backward(kind.backward), update_master_grads, step

    def watch_one_step(self, kind: Any) -> None:
        """Watch the class of 2018, whose `step` checks the gradients, under a static scale too."""
        apply = kind._update_scale

        @functools.wraps(apply)
        def update_scale(optimizer: Any, skip: Any) -> Any:  # called once, at the end of every `step`
            number, _ = self._known(optimizer)
            before = _scale(optimizer)
            result = apply(optimizer, skip)
            self._add_losses(optimizer, before, bool(skip))
            self._rows.add_step(number, not skip)
            return result

        kind.backward, kind._update_scale = self._backward(kind.backward), update_scale

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._known(optimizer)
            self._losses.setdefault(optimizer, []).append(value_of(loss))
            return original(optimizer, loss, *args, **kwargs)

        return backward

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
