"""Report what a script does to the guards, by replaced functions of torch and Apex."""

import functools
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import conv
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ampcompare.base.errors import GuardError
from ampcompare.base.location import Location, is_users_or_installed_file, user_location
from ampcompare.base.patches import Layer, PatchPoints, Subscriptions, calling_frame, has_stand_in
from ampcompare.guards.checks import DETECTORS
from ampcompare.guards.detection.detector import EVENTS, Detector
from ampcompare.guards.detection.gradient_hooks import GradientHooks, follow_tensor_limits
from ampcompare.guards.detection.library_remedies import remedies_of_calling_library
from ampcompare.guards.detection.reporting import GuardWarning, ViolationSink
from ampcompare.guards.detection.script_state import EnteredAutocast, ScaleLossBlock, ScriptState

OUTSIDE_BACKWARD = -1
MAX_BLOCKS = 64  # of autocast, in which layers are watched: later steps call them as they are
CAST_LAYERS = (nn.Linear, conv._ConvNd)
MAX_ENTRIES = 16  # of one forward pass; evaluation enters autocast without end
DEVICES = ("cpu", "cuda", "xpu", "mps")
ASKED = "_ampcompare_asked"
# ways to train in which Accelerate leaves fp16 to another library
CASTS_ITSELF = ("DEEPSPEED", "MEGATRON_LM")


class GuardHooks:
    """All guards, and the functions that report events to them.

    Steps are watched at the class, not by torch's hooks: with hooks ampcompare's engine would read each overflow on
    the host.
    """

    def __init__(self, sink: ViolationSink, passes: int | None = None) -> None:
        self.facts = ScriptState()
        self.facts.hooks = GradientHooks()
        self._passes = passes
        self._events = Subscriptions(Layer.GUARDS)
        self._casts: Subscriptions | None = None  # from the first autocast on, for some blocks
        self._blocks = 0  # outermost ones of autocast, that have ended
        self._detectors = [detector(self.facts, sink) for detector in DETECTORS.values()]
        self._collect_listeners()
        self._watch_backward_passes()
        self._watch_optimizers()
        if not has_stand_in(*PatchPoints.MAKE_AUTOCAST):  # else the script's calls are not what happens
            self._watch_scaler()
            _watch_autocast(self._events, self.facts)
            self._events.wrap(*PatchPoints.ENTER_AUTOCAST, self._enter_autocast_watching_weight_casts)
            _watch_scalers_without_device(self._events, self.facts)
        self._watch_clipping()
        self._watch_modules()
        self._events.wrap(torch, "save", self._report_save)

    def end(self) -> None:
        self._events.end()
        self._notify_listeners("at_guard_removal")

    def _end_after_enough_passes(self) -> bool:
        enough = self._passes is not None and self.facts.backwards >= self._passes
        if enough:
            self.end()
        return enough

    def _collect_listeners(self) -> None:
        self._listeners = {
            event: [
                one for one in self._detectors if getattr(type(one), event) is not getattr(Detector, event)
            ]
            for event in EVENTS
        }

    def _notify_listeners(self, event: str, *values: Any) -> None:
        for detector in self._listeners[event]:
            try:
                getattr(detector, event)(*values)
            except GuardError:
                raise
            except Exception as error:  # a fault in a guard must not end a correct training
                self._detectors.remove(detector)
                self._collect_listeners()
                warnings.warn(
                    f"the guard {detector.guard.name} failed and is off: {error!r}",
                    GuardWarning,
                    stacklevel=1,
                )

    def _watch_backward_passes(self) -> None:
        facts, task = self.facts, torch._C._current_graph_task_id

        def backward(original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Checkpointing makes passes inside a pass. A step that Apex skips is not seen, so the guards may end here.
            if task() != OUTSIDE_BACKWARD or self._end_after_enough_passes():
                return original(tensors, grad_tensors, *args, **kwargs)
            self._notify_listeners("at_backward", tensors, grad_tensors)
            facts.backwards += 1
            facts.window_backwards += 1
            for block in facts.blocks:
                block.backwards += 1
            facts.is_in_backward = True
            try:
                result = original(tensors, grad_tensors, *args, **kwargs)
            finally:
                facts.is_in_backward = False
            facts.autocasts.clear()
            return result

        self._events.wrap(*PatchPoints.BACKWARD, backward)
        self.facts.hooks.follow_registrations(self._events)

    def _watch_optimizers(self) -> None:
        watched: set[type] = set()

        def watch_step(kind: type) -> None:
            cls = next(cls for cls in kind.__mro__ if "step" in vars(cls))
            # Torch wraps `step` when the first object is built; the guards' wrapper goes outside.
            if cls not in watched and hasattr(cls.__dict__["step"], "hooked"):
                watched.add(cls)
                self._events.wrap(cls, "step", self._follow_step_call)

        def patch_step_function(original: Any, optimizer: Any) -> None:
            original(optimizer)
            self.facts.optimizers.add(optimizer)
            watch_step(type(optimizer))

        for kind in list(_subclasses_below(Optimizer)):
            watch_step(kind)
        self._events.wrap(Optimizer, "_patch_step_function", patch_step_function)

    def _follow_step_call(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        if facts.scaler_stepping:
            facts.scaler_stepping[-1].append(optimizer)
        if facts.stepping:  # by a scaler, or an optimizer around another
            return original(optimizer, *args, **kwargs)
        return self._report_step_attempt(optimizer, None, lambda: original(optimizer, *args, **kwargs))

    def _report_step_attempt(self, optimizer: Any, scaler: Any, step: Any) -> Any:
        facts = self.facts
        facts.optimizers.add(optimizer)
        self._notify_listeners("at_step_attempt", optimizer, scaler)
        facts.attempts += 1
        called: list[Any] = []
        facts.stepping.append(optimizer)
        if scaler is not None:
            facts.scaler_stepping.append(called)
        try:
            result = step()
        finally:
            facts.stepping.pop()
            if scaler is not None:
                facts.scaler_stepping.pop()
        self._notify_listeners("after_step_attempt", optimizer, scaler, scaler is None or bool(called))
        self._end_after_enough_passes()
        return result

    def _watch_scaler(self) -> None:
        facts = self.facts

        def scale(original: Any, scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if scaler.is_enabled():
                if scaler not in facts.scalers:
                    facts.scalers.add(scaler)
                    facts.remedies = remedies_of_calling_library()
                if not facts.scale_calls:
                    facts.scale_read = False
                losses = [result] if isinstance(result, Tensor) else list(result)
                facts.scale_calls += len(losses)
                facts.scaled.update({id(loss): loss for loss in losses if isinstance(loss, Tensor)})
            return result

        def unscale(original: Any, scaler: Any, optimizer: Any) -> Any:
            result = original(scaler, optimizer)
            facts.unscaled.add(optimizer)
            return result

        def step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            return self._report_step_attempt(
                optimizer, scaler, lambda: original(scaler, optimizer, *args, **kwargs)
            )

        def update(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
            facts.clear_counts_since_update()
            return original(scaler, *args, **kwargs)

        def get_scale(original: Any, scaler: Any) -> Any:
            facts.scale_read = True
            return original(scaler)

        watched: dict[str, Any] = {"scale": scale, "unscale_": unscale, "step": step, "update": update}
        watched |= {"get_scale": get_scale, "state_dict": self._report_state_read}
        for name, function in watched.items():
            self._events.wrap(torch.amp.GradScaler, name, function)

    def _enter_autocast_watching_weight_casts(self, original: Any, autocast: Any) -> Any:
        """Watch the layers whose weights autocast casts, from its first block on."""
        if self._casts is None:
            self._casts = Subscriptions(Layer.GUARDS)
            self._casts.wrap(*PatchPoints.FORWARD, self._report_weight_cast)
            self._casts.wrap(torch, "clear_autocast_cache", self._report_cleared_autocast_cache)
            self._events.call_at_end(self._casts.end)
        return original(autocast)

    def _report_weight_cast(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, CAST_LAYERS) and torch.is_autocast_cache_enabled():
            weight = module._parameters.get("weight")
            if type(weight) is nn.Parameter and weight.requires_grad and weight.dtype is torch.float32:
                device = weight.device.type
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    self._notify_listeners(
                        "at_weight_cast_by_autocast", weight, torch.get_autocast_dtype(device)
                    )
        return original(module, *args, **kwargs)

    def _report_cleared_autocast_cache(self, original: Any) -> None:
        original()
        self._notify_listeners("after_autocast_cache_cleared")
        self._blocks += 1
        if self._blocks >= MAX_BLOCKS and self._casts is not None:
            self._casts.end()

    def _watch_clipping(self) -> None:
        def clip(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._notify_listeners("at_clipping", parameters)
            return original(parameters, *args, **kwargs)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (clip_grad, nn.utils):
                self._events.wrap(owner, name, clip)

        def is_scaled() -> bool:
            return self.facts.holds_scaled_gradients() or self.facts.is_inside_scale_loss_block()

        follow_tensor_limits(
            self._events, is_scaled, functools.partial(self._notify_listeners, "after_clamp")
        )

    def _report_state_read(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._notify_listeners("at_amp_state_read")
        return original(*args, **kwargs)

    def _report_save(self, original: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._notify_listeners("at_torch_save", obj)
        return original(obj, *args, **kwargs)

    def _watch_modules(self) -> None:
        # Apex itself casts what it initializes.
        def half(original: Any, module: Any) -> Any:
            if is_users_or_installed_file(calling_frame().f_code.co_filename):
                self._notify_listeners("at_half_cast", module)
            return original(module)

        def cuda(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            self._notify_listeners("at_move_to_gpu", module)
            return original(module, *args, **kwargs)

        def to(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if value is torch.float16 and is_users_or_installed_file(calling_frame().f_code.co_filename):
                    self._notify_listeners("at_half_cast", module)
                elif _does_argument_mean_gpu(value):
                    self._notify_listeners("at_move_to_gpu", module)
            return original(module, *args, **kwargs)

        for name, function in {"half": half, "cuda": cuda, "to": to}.items():
            self._events.wrap(nn.Module, name, function)

        def init(original: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self._notify_listeners("at_parallel_wrapping", module)
            original(wrapper, module, *args, **kwargs)

        for kind in (DataParallel, DistributedDataParallel):
            self._events.wrap(kind, "__init__", init)

    def watch_accelerate(self, kind: Any) -> None:
        """Record each `Accelerator` that is asked for fp16 and neither casts nor scales: it has no fp16 on a CPU."""

        def init(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
            original(accelerator, *args, **kwargs)
            is_off = accelerator.mixed_precision == "fp16" and not accelerator.native_amp
            # An arm of ampcompare's own says itself what it runs.
            if is_off and accelerator.distributed_type not in CASTS_ITSELF:
                if is_users_or_installed_file(calling_frame().f_code.co_filename):
                    self.facts.accelerators_off.append((accelerator.device.type, _location_in_script()))

        self._events.wrap(kind, "__init__", init)

    def watch_amp(self, amp: Any) -> None:
        facts, name = self.facts, amp.__name__
        if facts.amp is amp:  # ampcompare's own has two names
            return
        facts.amp = amp
        frontend, handle = sys.modules[f"{name}.frontend"], sys.modules[f"{name}.handle"]

        def initialize(
            original: Any, models: Any, optimizers: Any, properties: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._notify_listeners("at_initialize", _as_list(models), _as_list(optimizers), properties)
            return original(models, optimizers, properties, *args, **kwargs)

        def scale_loss(original: Any, loss: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
            return self._watch_scale_loss_block(
                original(loss, optimizers, *args, **kwargs), loss, _as_list(optimizers)
            )

        def make_wrapper_reporting(event: str) -> Any:
            def around(original: Any, optimizer: Any) -> None:
                original(optimizer)
                if optimizer in facts.prepared:  # those of the script; an arm prepares others without that
                    self._notify_listeners(event, optimizer)

            return around

        self._events.wrap(frontend, "_initialize", initialize)
        methods = sys.modules.get(f"{name}._process_optimizer")
        for function, event in (
            ("lazy_init_with_master_weights", "after_masters_made"),
            ("_master_params_to_model_params", "after_masters_copied"),
        ):
            if hasattr(methods, function):  # private names of an Apex that may be of any version
                self._events.wrap(methods, function, make_wrapper_reporting(event))
        for owner in (handle, amp):
            self._events.wrap(owner, "scale_loss", scale_loss)
        for owner in (frontend, amp):
            if "state_dict" in vars(owner):
                self._events.wrap(owner, "state_dict", self._report_state_read)

    @contextmanager
    def _watch_scale_loss_block(self, inner: Any, loss: Any, optimizers: list[Any]) -> Iterator[Any]:
        """Enter a `scale_loss` block, and record what happens to its loss."""
        facts, block = self.facts, ScaleLossBlock(optimizers, scaled=False)
        self._notify_listeners("at_scale_loss_block", optimizers)
        facts.blocks.append(block)
        try:
            with inner as scaled:
                block.scaled = scaled is not loss
                if block.scaled and isinstance(scaled, Tensor):
                    facts.scaled[id(scaled)] = scaled
                del loss  # else the graph would live as long as the block
                yield scaled
        finally:
            facts.blocks.remove(block)
        self._notify_listeners("after_scale_loss_block", optimizers)


def _subclasses_below(kind: type[Any]) -> Iterable[type[Any]]:
    child: type[Any]
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses_below(child)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _does_argument_mean_gpu(value: Any) -> bool:
    """Return whether an argument of `Module.to` means a GPU."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    if isinstance(value, (torch.device, Tensor)):
        return (value if isinstance(value, torch.device) else value.device).type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def _watch_autocast(events: Subscriptions, facts: ScriptState) -> None:
    """Record each `with torch.autocast(...)` that is not asked to be off, with the devices that it is on for."""
    signature = inspect.signature(torch.autocast.__init__)

    def init(original: Any, autocast: Any, *args: Any, **kwargs: Any) -> None:
        original(autocast, *args, **kwargs)
        given = signature.bind(autocast, *args, **kwargs).arguments
        setattr(autocast, ASKED, (given.get("enabled", True), given.get("dtype") is not None))

    def enter(original: Any, autocast: Any) -> Any:
        result = original(autocast)
        is_enabled, is_dtype_given = getattr(autocast, ASKED, (False, False))
        if is_enabled:
            entry = EnteredAutocast(
                autocast.device, autocast.fast_dtype, is_dtype_given, _location_in_script()
            )
            entry.on_for.update(_types_of_devices_with_autocast_on())
            facts.autocasts.append(entry)
            del facts.autocasts[:-MAX_ENTRIES]
        return result

    def leave(original: Any, autocast: Any, *exception: Any) -> Any:
        if facts.autocasts:  # the state again: what stands in for a GPU may set that of the CPU after `enter`
            facts.autocasts[-1].on_for.update(_types_of_devices_with_autocast_on())
        return original(autocast, *exception)

    events.wrap(*PatchPoints.MAKE_AUTOCAST, init)
    events.wrap(*PatchPoints.ENTER_AUTOCAST, enter)
    events.wrap(*PatchPoints.LEAVE_AUTOCAST, leave)


def _location_in_script() -> Location:
    """Return the line of the script itself, where another package stands between it and torch."""
    location = user_location()
    return location.caller or location


def _types_of_devices_with_autocast_on() -> list[str]:
    return [
        device
        for device in DEVICES
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ]


def _watch_scalers_without_device(events: Subscriptions, facts: ScriptState) -> None:
    """Record each GradScaler that is asked to be on, and is off since torch does not see its device."""
    signature = inspect.signature(torch.amp.GradScaler.__init__)

    def init(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        given = signature.bind(scaler, *args, **kwargs).arguments
        if given.get("enabled", True) and not scaler.is_enabled():
            facts.scalers_off.append((str(given.get("device", "cuda")), _location_in_script()))

    events.wrap(*PatchPoints.MAKE_SCALER, init)
