"""Record each backward pass, step and skipped step of `apex.amp`, ampcompare's or the real one, and of other scalers.

These are `torch.amp.GradScaler`, and the two `FP16_Optimizer` classes: of `apex.fp16_utils`, and of 2018, now in
`apex.contrib.optimizers`.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.imports.adapter_imports import adapter_keeps_own_functions, call_with_each_adapter
from ampcompare.script.imports.fp16_classes import fp16_optimizer_classes
from ampcompare.script.recording.recorder import RecordedSteps, number_or_detached_tensor


def record_steps(rows: RecordedSteps, *, amp: bool) -> None:
    """Record what this process does until its record ends; with `amp` what goes through Apex too."""
    events = Subscriptions(Layer.RECORD)
    if amp:
        _record_apex_amp(rows, events)
    call_with_each_adapter(functools.partial(_record_adapter_unless_arm_answers, rows, events), events)
    record_grad_scalers(rows, events)
    _record_fp16_optimizers(rows, events)
    rows.recorder.call_before_close(events.end)


def _record_apex_amp(rows: RecordedSteps, events: Subscriptions) -> None:
    """Record what goes through `amp.initialize`, `amp.scale_loss` and the steps of the optimizers from here on."""
    hooks = _AmpRecordingHooks(rows, sys.modules["apex.amp"])
    frontend, handle, scaler = (sys.modules[f"apex.amp.{name}"] for name in ("frontend", "handle", "scaler"))
    # Not `initialize` itself: its warning points at its caller, which must be the script.
    events.wrap(frontend, "_initialize", hooks.initialize)
    for owner in (hooks.amp, handle):
        events.wrap(owner, "scale_loss", hooks.scale_loss)
    if hasattr(handle.AmpHandle, "_scale_block"):  # of ampcompare's engine: in the real one that API raises
        events.wrap(handle.AmpHandle, "_scale_block", hooks.scale_loss_of_handle)
    events.wrap(scaler.LossScaler, "update_scale", hooks.update_scale)


def _record_adapter_unless_arm_answers(
    rows: RecordedSteps, events: Subscriptions, adapter: types.ModuleType
) -> None:
    """Record what goes through the adapter that `migrate` writes, unless an arm answers in its place."""
    if not adapter_keeps_own_functions(adapter):
        return
    hooks = _AmpRecordingHooks(rows, adapter)
    events.wrap(adapter, "initialize", hooks.initialize_adapter)
    events.wrap(adapter, "scale_loss", hooks.scale_loss)
    events.wrap(adapter.LossScaler, "update_scale", hooks.update_scale)


class _AmpRecordingHooks:
    """Stands around the functions of `apex.amp`; `overflow` is the outcome of the last check, None without one."""

    def __init__(self, rows: RecordedSteps, amp: Any) -> None:
        self.rows = rows
        self.amp = amp
        self.overflow: bool | None = None
        # of scalers of `amp.init`
        self._loss_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def initialize(
        self, original: Any, models: Any, optimizers: Any, properties: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record what is prepared."""
        result = original(models, optimizers, properties, *args, **kwargs)
        self._record_prepared_optimizers(optimizers)
        return result

    def initialize_adapter(
        self, original: Any, models: Any, optimizers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Record what is prepared by the adapter, whose function is called with `enabled=False` too."""
        result = original(models, optimizers, *args, **kwargs)
        if self.amp._amp_state.opt_properties.enabled:
            self._record_prepared_optimizers(optimizers)
        return result

    def _record_prepared_optimizers(self, optimizers: Any) -> None:
        given = (
            [] if optimizers is None else list(optimizers) if isinstance(optimizers, list) else [optimizers]
        )
        numbers = [self._watch_and_number_optimizer(optimizer) for optimizer in given]
        scalers = self.amp._amp_state.loss_scalers
        self.rows.has_initialized = True
        self.rows.reserve_loss_ids(len(scalers))
        self.rows.add_initialize(
            self.amp._amp_state.opt_properties.opt_level,
            {number: type(one).__name__ for number, one in zip(numbers, given, strict=True)},
            [float(scaler.loss_scale()) for scaler in scalers],
            [bool(scaler.dynamic) for scaler in scalers],
        )

    def _watch_and_number_optimizer(self, optimizer: Any) -> int:
        """Return the number of an optimizer, and watch the steps of a new one."""
        number, is_new = self.rows.optimizer_number_and_is_new(optimizer)
        if is_new:
            _record_steps_of_optimizer(self, optimizer, number)
        return number

    def scale_loss(
        self, original: Any, loss: Any, optimizers: Any, loss_id: int = 0, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[Any]:
        """Run a block of `scale_loss`, and record its backward pass."""
        block = original(loss, optimizers, loss_id, *args, **kwargs)
        return self._record_scaled_block(
            block, loss, optimizers, loss_id, functools.partial(self.current_scale, loss_id)
        )

    def scale_loss_of_handle(
        self, original: Any, handle: Any, loss: Any, optimizer: Any, scaler: Any
    ) -> AbstractContextManager[Any]:
        """Do so in the API before `initialize`, where the first block of a scaler shows which optimizer it is for."""
        if scaler not in self._loss_ids:
            self._loss_ids[scaler] = self.rows.make_loss_id()
            self.rows.has_initialized = True
            names = {self._watch_and_number_optimizer(optimizer): type(optimizer).__name__}
            self.rows.add_initialize("amp.init", names, [float(scaler.loss_scale())], [bool(scaler.dynamic)])
        block = original(handle, loss, optimizer, scaler)
        return self._record_scaled_block(block, loss, optimizer, self._loss_ids[scaler], scaler.loss_scale)

    @contextmanager
    def _record_scaled_block(
        self, block: Any, loss: Any, optimizers: Any, loss_id: int, scale: Callable[[], float | None]
    ) -> Iterator[Any]:
        with block as scaled:
            self.rows.blocks += 1
            before, value = scale(), number_or_detached_tensor(loss)
            try:
                yield scaled
            finally:
                self.overflow = None
                self.rows.blocks -= 1
        several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        numbers = [self._watch_and_number_optimizer(one) for one in several]
        skips: list[int] = numbers if self.overflow else []
        for number in skips:
            # whose own step leaves out the next one
            if not hasattr(self.rows.optimizers[number], "_adapter_stash"):
                _wrap_skipping_step_to_record(self, self.rows.optimizers[number], number)
        self.rows.add_backward(value, loss_id, (before, scale()), self.overflow, numbers, skips)

    def update_scale(self, original: Any, scaler: Any) -> Any:
        """Note an overflow; a static scale is never checked: its False means nothing."""
        overflow = original(scaler)
        self.overflow = bool(overflow) if scaler.dynamic else None
        return overflow

    def current_scale(self, loss_id: int) -> float | None:
        """Return the current loss scale; None if amp is off."""
        state = self.amp._amp_state
        if not state.opt_properties.enabled:
            return None
        return float(state.loss_scalers[loss_id].loss_scale())


def _record_steps_of_optimizer(hooks: _AmpRecordingHooks, optimizer: Any, number: int) -> None:
    inner = optimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_skip = bool(getattr(getattr(self, "_adapter_stash", None), "already_patched", False))
        result = inner(*args, **kwargs)
        hooks.rows.add_step(number, not is_skip)
        return result

    _replace_step_method(optimizer, step, inner)


def _wrap_skipping_step_to_record(hooks: _AmpRecordingHooks, optimizer: Any, number: int) -> None:
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

    _replace_step_method(optimizer, step, skip)
    step._ampcompare_awaits_skip = True  # type: ignore[attr-defined]


def _replace_step_method(optimizer: Any, step: Any, inner: Any) -> None:
    """Set a bound method, which LR schedulers need, with the attributes of the one before."""
    step.__dict__.update(getattr(inner, "__dict__", {}))
    optimizer.step = types.MethodType(step, optimizer)


def _record_fp16_optimizers(rows: RecordedSteps, events: Subscriptions) -> None:
    """Record what goes through all objects of both classes from now on, ampcompare's or the real ones."""
    methods = (("backward", "update_master_grads", "step"), ("backward", "_update_scale"))
    for kind, names in zip(fp16_optimizer_classes(), methods, strict=False):
        hooks = _FP16OptimizerRecordingHooks(rows)
        for name in names:
            events.wrap(kind, name, getattr(hooks, name.lstrip("_")))


class _FP16OptimizerRecordingHooks:
    """Stands around the methods of one class.

    That of `apex.fp16_utils` checks the gradients in `update_master_grads`, and uses them in `step`; that of 2018
    does both in `step`, under a static scale too, which calls `_update_scale` once, at its end.
    """

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._numbers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        # Losses whose gradients were not yet checked for overflow.
        self._losses: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def backward(self, original: Any, optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a loss."""
        if optimizer in self._rows.ignored:
            return original(optimizer, loss, *args, **kwargs)
        self._numbers_of_optimizer_and_losses(optimizer)
        self._losses.setdefault(optimizer, []).append(number_or_detached_tensor(loss))
        return original(optimizer, loss, *args, **kwargs)

    def update_master_grads(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the losses; Apex checks for overflow under a dynamic scale only."""
        if optimizer in self._rows.ignored:
            return original(optimizer, *args, **kwargs)
        before = _loss_scale_of_optimizer(optimizer)
        result = original(optimizer, *args, **kwargs)
        self._record_losses(
            optimizer, before, bool(optimizer.overflow) if optimizer.dynamic_loss_scale else None
        )
        return result

    def step(self, original: Any, optimizer: Any, closure: Any = None) -> Any:
        """Record a step; a closure is called again until its gradients are finite."""
        if optimizer in self._rows.ignored:
            return original(optimizer, closure)
        applied = closure is not None or not optimizer.overflow
        result = original(optimizer, closure)
        self._rows.add_step(self._numbers_of_optimizer_and_losses(optimizer)[0], applied)
        return result

    def update_scale(self, original: Any, optimizer: Any, skip: Any) -> Any:
        """Record the losses and the step."""
        number, _ = self._numbers_of_optimizer_and_losses(optimizer)
        before = _loss_scale_of_optimizer(optimizer)
        result = original(optimizer, skip)
        self._record_losses(optimizer, before, bool(skip))
        self._rows.add_step(number, not skip)
        return result

    def _numbers_of_optimizer_and_losses(self, optimizer: Any) -> tuple[int, int]:
        """Return the numbers of the optimizer and of its losses; the first call records both."""
        numbers = self._numbers.get(optimizer)
        if numbers is None:
            number, _ = self._rows.optimizer_number_and_is_new(optimizer.optimizer)
            numbers = self._numbers[optimizer] = number, self._rows.make_loss_id()
            names = {number: type(optimizer.optimizer).__name__}
            dynamic = bool(optimizer.dynamic_loss_scale)
            self._rows.add_initialize(
                "FP16_Optimizer", names, [_loss_scale_of_optimizer(optimizer)], [dynamic]
            )
        return numbers

    def _record_losses(self, optimizer: Any, before: float, overflow: bool | None) -> None:
        """Record the losses since the last check; the last one carries its outcome."""
        number, loss_id = self._numbers_of_optimizer_and_losses(optimizer)
        scales = before, _loss_scale_of_optimizer(optimizer)
        skips = [number] if overflow else []
        self._rows.add_losses(self._losses.pop(optimizer, []), loss_id, scales, overflow, [number], skips)


def _loss_scale_of_optimizer(optimizer: Any) -> float:
    scaler = getattr(optimizer, "loss_scaler", None)  # the class of 2018 has none
    return float(optimizer.cur_scale if scaler is None else scaler.loss_scale())


@dataclass
class _ScalerCallsSinceUpdate:
    """What one scaler did since its last `update`; `named` are optimizers that the record has listed for it."""

    loss_id: int
    scale: Any = None
    losses: list[Any] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    named: set[int] = field(default_factory=set)


def record_grad_scalers(rows: RecordedSteps, events: Subscriptions) -> None:
    """Record what goes through every GradScaler of this process, those of `torch.cuda.amp` and subclasses too."""
    hooks = _ScalerRecordingHooks(rows)
    events.wrap(torch.amp.GradScaler, "scale", hooks.scale)
    events.wrap(torch.amp.GradScaler, "step", hooks.step)
    events.wrap(torch.amp.GradScaler, "update", hooks.update)
    events.call_at_end(register_optimizer_step_pre_hook(hooks.before_optimizer_step).remove)
    events.call_at_end(register_optimizer_step_post_hook(hooks.after_optimizer_step).remove)
    rows.recorder.call_before_close(hooks.close)


class _ScalerRecordingHooks:
    """Stands around the methods of `GradScaler`."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        # of scalers that are gone, too: they are written at the end
        self._windows: dict[Any, _ScalerCallsSinceUpdate] = {}
        self._in_scaler_step = False
        self._stepping: list[Any] = []  # optimizers that step by themselves, outermost first

    def _calls_since_update_of(self, scaler: Any) -> _ScalerCallsSinceUpdate:
        if scaler not in self._windows:
            self._windows[scaler] = _ScalerCallsSinceUpdate(self._rows.make_loss_id())
        return self._windows[scaler]

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Note losses."""
        result = original(scaler, outputs)
        if scaler in self._rows.ignored:
            return result
        losses = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        if self._rows.is_outside_scale_loss_blocks:
            self._rows.add_unscaled_backward(number_or_detached_tensor(losses[0]))
            return result
        window = self._calls_since_update_of(scaler)
        if not window.losses:
            window.scale = _loss_scale_without_sync(scaler)
        window.losses += map(number_or_detached_tensor, losses)
        return result

    def step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a step, and whether it was skipped."""
        if scaler in self._rows.ignored:
            return original(scaler, optimizer, *args, **kwargs)
        called: list[Any] = []
        hook = None
        if isinstance(optimizer, torch.optim.Optimizer):
            hook = optimizer.register_step_post_hook(lambda *_: called.append(True))
        self._in_scaler_step = True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler_step = False
            if hook is not None:
                hook.remove()
        number, _ = self._rows.optimizer_number_and_is_new(optimizer)
        on_device = getattr(
            optimizer, "_step_supports_amp_scaling", False
        ) and _device_overflow_flags_of_step(scaler, optimizer)
        certain = hook is not None and not on_device
        applied = (
            bool(called) if certain else not any(map(bool, _device_overflow_flags_of_step(scaler, optimizer)))
        )
        self._calls_since_update_of(scaler).steps.append(self._rows.step_row(number, applied))
        return result

    def before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping.append(optimizer)

    def after_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        """Note the step of an optimizer by itself, where the only loss since its last step is one that was scaled."""
        is_inner = len(self._stepping) > 1
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]  # and what has raised in its step
        open_windows = [(scaler, window) for scaler, window in self._windows.items() if window.losses]
        if is_inner or self._in_scaler_step or len(open_windows) != 1 or self._rows.has_initialized:
            return
        ((scaler, window),) = open_windows
        number = self._rows.optimizer_number_and_is_new(optimizer)[0]
        if any(row["optimizer"] == number for row in window.steps):
            return
        window.steps.append(self._rows.step_row(number, True))
        self._record_calls_since_update(scaler, window, ended=False)

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Write what the scaler did since the last update."""
        result = original(scaler, *args, **kwargs)
        if scaler not in self._rows.ignored:
            self._record_calls_since_update(scaler, self._calls_since_update_of(scaler), ended=True)
        return result

    def close(self) -> None:
        """Write what was not followed by an update."""
        for scaler, window in self._windows.items():
            self._record_calls_since_update(scaler, window, ended=False)

    def _record_calls_since_update(
        self, scaler: Any, window: _ScalerCallsSinceUpdate, *, ended: bool
    ) -> None:
        """Write the rows of a window: the losses, whose last one carries the outcome, then the steps."""
        rows = self._rows
        losses, steps = window.losses, window.steps
        window.losses, window.steps = [], []  # first: a row may end the script
        numbers = [row["optimizer"] for row in steps]
        names = {
            number: type(rows.optimizers[number]).__name__ for number in numbers if number not in window.named
        }
        enabled = scaler.is_enabled()
        if names:
            window.named |= names.keys()
            rows.add_initialize(type(scaler).__name__, names, [window.scale], [enabled])
        skips = [row["optimizer"] for row in steps if not row["applied"]]
        decides = enabled and bool(steps)
        scales = window.scale, _loss_scale_without_sync(scaler) if decides and ended else window.scale
        overflow = bool(skips) if decides else None
        rows.add_losses(losses, window.loss_id, scales, overflow, numbers, skips if decides else [])
        for row in steps:
            rows.recorder.add_row(row)


def _loss_scale_without_sync(scaler: Any) -> Any:
    """Return the loss scale without waiting for a device; None if the scaler is off."""
    if not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)
    return number_or_detached_tensor(scaler.get_scale() if scale is None else scale)


def _device_overflow_flags_of_step(scaler: Any, optimizer: Any) -> list[Any]:
    """Return what a fused step skips by, which the host does not see; none if an arm decides on the host.

    To read one waits for the device.
    """
    if not scaler.is_enabled():
        return []
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())
