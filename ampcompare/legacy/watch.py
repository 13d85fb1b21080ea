"""Look over the shoulder of `apex.amp`, ours or the real one: each backward pass, and each step or skipped step."""

from __future__ import annotations

import functools
import sys
import time
import types
from contextlib import AbstractContextManager
from typing import Any

import torch

from ampcompare.legacy.recorder import Recorder

__all__ = ["watch_amp"]


def watch_amp(recorder: Recorder) -> None:
    """Record what goes through `amp.initialize`, `amp.scale_loss` and the steps of the optimizers from here on."""
    _Watch(recorder, sys.modules["apex.amp"]).begin()


class _Watch:
    """The session of a process.

    Our engine reads the overflow on the host, as Apex does, while a step or the loss scaler is watched.

    Attributes:
        overflow: what the loss scaler found at the last exit of `scale_loss`; None where it did not look.
    """

    def __init__(self, recorder: Recorder, amp: Any) -> None:
        self.recorder = recorder
        self.amp = amp
        self.overflow: bool | None = None
        self.optimizers: list[Any] = []
        self.steps: list[int] = []
        self.last_step: list[float | None] = []
        self.backwards = 0

    def begin(self) -> None:
        amp = self.amp
        home, handle, scaler = (sys.modules[f"apex.amp.{name}"] for name in ("frontend", "handle", "scaler"))
        # Not `initialize` itself: its warning points at its caller, which is to be the script.
        home._initialize = self._watched_initialize(home._initialize)  # type: ignore[attr-defined]
        amp.scale_loss = handle.scale_loss = self._watched_scale_loss(amp.scale_loss)  # type: ignore[attr-defined]
        self._watch_scaler(scaler.LossScaler)

    def _watched_initialize(self, original: Any) -> Any:
        @functools.wraps(original)
        def initialize(models: Any, optimizers: Any, properties: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(models, optimizers, properties, *args, **kwargs)
            given = [] if optimizers is None else list(optimizers) if isinstance(optimizers, list) else [optimizers]
            numbers = [self._number(optimizer) for optimizer in given]
            scalers = self.amp._amp_state.loss_scalers
            row = {
                "kind": "initialize",
                "opt_level": properties.opt_level,
                "optimizers": {str(number): type(one).__name__ for number, one in zip(numbers, given, strict=True)},
                "loss_scales": [float(scaler.loss_scale()) for scaler in scalers],
                "dynamic": [bool(scaler.dynamic) for scaler in scalers],
            }
            self.recorder.add(row, time.perf_counter())
            return result

        return initialize

    def _number(self, optimizer: Any) -> int:
        """Return the place of an optimizer in the order in which they came, and watch the steps of a new one."""
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        self.optimizers.append(optimizer)
        self.steps.append(0)
        self.last_step.append(None)
        number = len(self.optimizers) - 1
        _watch_steps(self, optimizer, number)
        return number

    def _watched_scale_loss(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale_loss(loss: Any, optimizers: Any, loss_id: int = 0, *args: Any, **kwargs: Any) -> Any:
            return _Backward(self, original(loss, optimizers, loss_id, *args, **kwargs), loss, optimizers, loss_id)

        return scale_loss

    def _watch_scaler(self, scaler: Any) -> None:
        original = scaler.update_scale

        @functools.wraps(original)
        def update_scale(this: Any) -> Any:
            overflow = original(this)
            # A static scale is never checked: its False says nothing.
            self.overflow = bool(overflow) if this.dynamic else None
            return overflow

        scaler.update_scale = update_scale

    def scale(self, loss_id: int) -> float | None:
        """Return the loss scale now; None where amp is off."""
        state = self.amp._amp_state
        if not state.opt_properties.enabled:
            return None
        return float(state.loss_scalers[loss_id].loss_scale())

    def left(self, loss: Any, optimizers: Any, loss_id: int, before: float | None) -> None:
        """Record a backward pass that has ended, and await the skips that it caused."""
        several = isinstance(optimizers, (list, tuple))
        numbers = [self._number(optimizer) for optimizer in (optimizers if several else [optimizers])]
        skips = numbers if self.overflow else []
        for number in skips:
            _watch_skip(self, self.optimizers[number], number)
        row = {
            "kind": "backward",
            "backward": self.backwards,
            "loss": loss,
            "loss_id": loss_id,
            "scale_before": before,
            "scale_after": self.scale(loss_id),
            "overflow": self.overflow,
            "optimizers": numbers,
            "skips": skips,
        }
        self.backwards += 1
        self.recorder.add(row, time.perf_counter())

    def stepped(self, number: int, applied: bool) -> None:
        """Record the end of a step, or that it was skipped."""
        now = time.perf_counter()
        last = self.last_step[number]
        row = {
            "kind": "step",
            "optimizer": number,
            "step": self.steps[number],
            "applied": applied,
            "seconds": None if last is None else now - last,
        }
        self.last_step[number] = now
        self.steps[number] += 1
        self.recorder.add(row, now)


class _Backward(AbstractContextManager[Any]):
    """One block of `scale_loss`."""

    __slots__ = ("_before", "_inner", "_loss", "_loss_id", "_optimizers", "_watch")

    def __init__(self, watch: _Watch, inner: Any, loss: Any, optimizers: Any, loss_id: int) -> None:
        self._watch, self._inner, self._optimizers, self._loss_id = watch, inner, optimizers, loss_id
        self._loss = loss
        self._before: float | None = None

    def __enter__(self) -> Any:
        scaled = self._inner.__enter__()
        self._before = self._watch.scale(self._loss_id)
        self._loss = _value(self._loss)
        return scaled

    def __exit__(self, *exception: Any) -> Any:
        watch = self._watch
        watch.overflow = None
        suppressed = self._inner.__exit__(*exception)
        if exception[0] is None:
            watch.left(self._loss, self._optimizers, self._loss_id, self._before)
        return suppressed


def _value(loss: Any) -> Any:
    """Return the loss as a number where that costs no waiting, else as a tensor that nobody else changes."""
    if not isinstance(loss, torch.Tensor):
        return float(loss) if isinstance(loss, (int, float)) else None
    if loss.numel() != 1:
        return None
    return loss.detach().item() if loss.device.type == "cpu" else loss.detach().clone()


def _watch_steps(watch: _Watch, optimizer: Any, number: int) -> None:
    inner = optimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        watch.stepped(number, True)
        return result

    _replace_step(optimizer, step, inner)


def _watch_skip(watch: _Watch, optimizer: Any, number: int) -> None:
    """Notice the one call of `optimizer.step` that amp has turned into a skip."""
    skip = optimizer.step
    if getattr(skip, "_ampcompare_awaits_skip", False):
        return
    spent = False

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        # Out of the way first: amp puts the former step back only where it finds its own.
        if getattr(self.__dict__.get("step"), "__func__", None) is step:
            self.step = skip
        result = skip(*args, **kwargs)
        if not spent:
            spent = True
            watch.stepped(number, False)
        return result

    _replace_step(optimizer, step, skip)
    step._ampcompare_awaits_skip = True  # type: ignore[attr-defined]


def _replace_step(optimizer: Any, step: Any, inner: Any) -> None:
    """Set a bound method, as LR schedulers need one, that bears the marks of the one before."""
    step.__dict__.update(getattr(inner, "__dict__", {}))
    optimizer.step = types.MethodType(step, optimizer)
