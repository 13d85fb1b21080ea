"""Record what goes through `apex.amp`, ampcompare's or the real one: each backward pass, step and skipped step."""

from __future__ import annotations

import sys
import types
from contextlib import AbstractContextManager
from typing import Any

from ampcompare.guards.events import Subscriptions
from ampcompare.script.legacy.record.rows import Rows, value_of

__all__ = ["record_amp"]


def record_amp(rows: Rows, events: Subscriptions) -> None:
    """Record what goes through `amp.initialize`, `amp.scale_loss` and the steps of the optimizers from here on."""
    hooks = _Hooks(rows, sys.modules["apex.amp"])
    frontend, handle, scaler = (sys.modules[f"apex.amp.{name}"] for name in ("frontend", "handle", "scaler"))
    # Not `initialize` itself: its warning points at its caller, which must be the script.
    events.wrap(frontend, "_initialize", hooks.initialize)
    for owner in (hooks.amp, handle):
        events.wrap(owner, "scale_loss", hooks.scale_loss)
    events.wrap(scaler.LossScaler, "update_scale", hooks.update_scale)


class _Hooks:
    """Stands around the functions of `apex.amp`.

    ampcompare's engine reads the overflow on the host, as Apex does, while a step or the loss scaler is wrapped.

    Attributes:
        overflow: outcome of the last check, at the exit of `scale_loss`; None if there was no check.
    """

    def __init__(self, rows: Rows, amp: Any) -> None:
        self.rows = rows
        self.amp = amp
        self.overflow: bool | None = None

    def initialize(
        self, original: Any, models: Any, optimizers: Any, properties: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record what is prepared."""
        result = original(models, optimizers, properties, *args, **kwargs)
        given = [] if optimizers is None else list(optimizers) if isinstance(optimizers, list) else [optimizers]
        numbers = [self._number(optimizer) for optimizer in given]
        scalers = self.amp._amp_state.loss_scalers
        self.rows.has_initialized = True
        self.rows.reserve_loss_ids(len(scalers))
        self.rows.add_initialize(
            properties.opt_level,
            {number: type(one).__name__ for number, one in zip(numbers, given, strict=True)},
            [float(scaler.loss_scale()) for scaler in scalers],
            [bool(scaler.dynamic) for scaler in scalers],
        )
        return result

    def _number(self, optimizer: Any) -> int:
        """Return the number of an optimizer, and watch the steps of a new one."""
        number, is_new = self.rows.number(optimizer)
        if is_new:
            _watch_steps(self, optimizer, number)
        return number

    def scale_loss(self, original: Any, loss: Any, optimizers: Any, loss_id: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Return a block that records its backward pass."""
        return _Backward(self, original(loss, optimizers, loss_id, *args, **kwargs), loss, optimizers, loss_id)

    def update_scale(self, original: Any, scaler: Any) -> Any:
        """Note an overflow; a static scale is never checked: its False means nothing."""
        overflow = original(scaler)
        self.overflow = bool(overflow) if scaler.dynamic else None
        return overflow

    def scale(self, loss_id: int) -> float | None:
        """Return the current loss scale; None if amp is off."""
        state = self.amp._amp_state
        if not state.opt_properties.enabled:
            return None
        return float(state.loss_scalers[loss_id].loss_scale())

    def left(self, loss: Any, optimizers: Any, loss_id: int, before: float | None) -> None:
        """Record a backward pass that has ended, and watch for the skips that it caused."""
        numbers = [self._number(one) for one in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
        skips = numbers if self.overflow else []
        for number in skips:
            _watch_skip(self, self.rows.optimizers[number], number)
        self.rows.add_backward(loss, loss_id, (before, self.scale(loss_id)), self.overflow, numbers, skips)


class _Backward(AbstractContextManager[Any]):
    """One block of `scale_loss`."""

    __slots__ = ("_before", "_hooks", "_inner", "_loss", "_loss_id", "_optimizers")

    def __init__(self, hooks: _Hooks, inner: Any, loss: Any, optimizers: Any, loss_id: int) -> None:
        self._hooks, self._inner, self._optimizers, self._loss_id = hooks, inner, optimizers, loss_id
        self._loss = loss
        self._before: float | None = None

    def __enter__(self) -> Any:
        scaled = self._inner.__enter__()
        self._hooks.rows.blocks += 1
        self._before = self._hooks.scale(self._loss_id)
        self._loss = value_of(self._loss)
        return scaled

    def __exit__(self, *exception: Any) -> Any:
        hooks = self._hooks
        hooks.overflow = None
        hooks.rows.blocks -= 1
        suppressed = self._inner.__exit__(*exception)
        if exception[0] is None:
            hooks.left(self._loss, self._optimizers, self._loss_id, self._before)
        return suppressed


def _watch_steps(hooks: _Hooks, optimizer: Any, number: int) -> None:
    inner = optimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        hooks.rows.add_step(number, True)
        return result

    _replace_step(optimizer, step, inner)


def _watch_skip(hooks: _Hooks, optimizer: Any, number: int) -> None:
    """Record the one call of `optimizer.step` that amp has turned into a skip."""
    skip = optimizer.step
    if getattr(skip, "_ampcompare_awaits_skip", False):
        return
    recorded = False

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        # Remove this wrapper first: amp restores the former step only if its own is in place.
        if getattr(self.__dict__.get("step"), "__func__", None) is step:
            self.step = skip
        result = skip(*args, **kwargs)
        if not recorded:
            recorded = True
            hooks.rows.add_step(number, False)
        return result

    _replace_step(optimizer, step, skip)
    step._ampcompare_awaits_skip = True  # type: ignore[attr-defined]


def _replace_step(optimizer: Any, step: Any, inner: Any) -> None:
    """Set a bound method, which LR schedulers need, with the attributes of the one before."""
    step.__dict__.update(getattr(inner, "__dict__", {}))
    optimizer.step = types.MethodType(step, optimizer)
