"""Record what goes through `torch.amp.GradScaler`: each scaled loss, each step or skipped step, each update."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompare.guards.events import Subscriptions
from ampcompare.script.legacy.record.rows import Rows, value_of

__all__ = ["record_grad_scalers"]


@dataclass
class _Window:
    """What one scaler did since its last `update`.

    Attributes:
        loss_id: number of its losses in the record.
        scale: at the first loss.
        losses: in the order in which they were scaled.
        steps: their rows, written after those of the losses.
        named: optimizers that the record has listed for this scaler.
    """

    loss_id: int
    scale: Any = None
    losses: list[Any] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    named: set[int] = field(default_factory=set)


def record_grad_scalers(rows: Rows, events: Subscriptions) -> None:
    """Record what goes through every GradScaler of this process, those of `torch.cuda.amp` and subclasses too."""
    hooks = _Hooks(rows)
    events.wrap(torch.amp.GradScaler, "scale", hooks.scale)
    events.wrap(torch.amp.GradScaler, "step", hooks.step)
    events.wrap(torch.amp.GradScaler, "update", hooks.update)
    rows.recorder.before_close(hooks.close)


class _Hooks:
    """Stands around the methods of `GradScaler`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()

    def _window(self, scaler: Any) -> _Window:
        window = self._windows.get(scaler)
        if window is None:
            window = self._windows[scaler] = _Window(self._rows.new_loss_id())
        return window

    def _is_ignored(self, scaler: Any) -> bool:
        return self._rows.has_amp or scaler in self._rows.ignored

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Note losses."""
        result = original(scaler, outputs)
        if self._is_ignored(scaler):
            return result
        window = self._window(scaler)
        if not window.losses:
            window.scale = _scale_of(scaler)
        losses = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        window.losses += map(value_of, losses)
        return result

    def step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a step, and whether it was skipped."""
        if self._is_ignored(scaler):
            return original(scaler, optimizer, *args, **kwargs)
        called: list[Any] = []
        hook = None
        if isinstance(optimizer, torch.optim.Optimizer):
            hook = optimizer.register_step_post_hook(lambda *_: called.append(True))
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        number, _ = self._rows.number(optimizer)
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False) and _found_infs(scaler, optimizer)
        certain = hook is not None and not on_device
        applied = bool(called) if certain else not any(map(bool, _found_infs(scaler, optimizer)))
        self._window(scaler).steps.append(self._rows.step_row(number, applied))
        return result

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Write what the scaler did since the last update."""
        result = original(scaler, *args, **kwargs)
        if not self._is_ignored(scaler):
            self._close(scaler, self._window(scaler), ended=True)
        return result

    def close(self) -> None:
        """Write what was not followed by an update."""
        for scaler, window in self._windows.items():
            self._close(scaler, window, ended=False)

    def _close(self, scaler: Any, window: _Window, *, ended: bool) -> None:
        """Write the rows of a window: the losses, whose last one carries the outcome, then the steps."""
        rows = self._rows
        losses, steps = window.losses, window.steps
        window.losses, window.steps = [], []  # first: a row may end the script
        numbers = [row["optimizer"] for row in steps]
        names = {number: type(rows.optimizers[number]).__name__ for number in numbers if number not in window.named}
        enabled = scaler.is_enabled()
        if names:
            window.named |= names.keys()
            rows.add_initialize(type(scaler).__name__, names, [window.scale], [enabled])
        skips = [row["optimizer"] for row in steps if not row["applied"]]
        for index, loss in enumerate(losses, 1):
            decides = index == len(losses) and bool(steps) and enabled
            after = _scale_of(scaler) if decides and ended else window.scale
            rows.add_backward(
                loss,
                window.loss_id,
                (window.scale, after),
                bool(skips) if decides else None,
                numbers,
                skips if decides else [],
            )
        for row in steps:
            rows.recorder.add_row(row)


def _scale_of(scaler: Any) -> Any:
    """Return the loss scale without waiting for a device; None if the scaler is off."""
    if not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)
    return value_of(scaler.get_scale() if scale is None else scale)


def _found_infs(scaler: Any, optimizer: Any) -> list[Any]:
    """Return what a fused step skips by, which the host does not see; none if an arm decides on the host.

    To read one waits for the device.
    """
    if not scaler.is_enabled():
        return []
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())
