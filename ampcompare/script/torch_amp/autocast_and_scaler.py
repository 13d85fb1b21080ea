"""Stand behind `torch.autocast` and `GradScaler` of a script, so that they do what the arm does.

The script keeps its own blocks: where it switches autocast off, it stays off. A GradScaler keeps the settings that the
script passes, except those that the arm names.
"""

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ScalingError, UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import PatchPoints, Subscriptions, calling_frame
from ampcompare.script.recording.recorder import RecordedSteps, number_or_detached_tensor
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.torch_amp.scaled_losses import ScaledLossesWatch
from ampcompare.training.precision import keep_fp32
from ampcompare.training.precision.base import NO_CONTEXT, half_dtype_of
from ampcompare.training.precision.optimizer_state import hold_state_in_type

SCALER = inspect.signature(torch.amp.GradScaler)
SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


class OpenAutocastBlock:
    """One autocast block that stays open, and the parts of a script without it.

    The block is left and made again, not nested: only at the outermost exit does torch drop the casts of weights that
    it has cached.
    """

    def __init__(self) -> None:
        self._make: Callable[[], torch.autocast] | None = None
        self._block: torch.autocast | None = None
        self._parts = 0

    def type_cast_to_now(self) -> torch.dtype | None:
        """Return the type that functions are cast to; None where casts are off."""
        if self._block is None or not torch.is_autocast_enabled(self._block.device):
            return None
        return torch.get_autocast_dtype(self._block.device)

    def switch_casts_on(self, make: Callable[[], torch.autocast]) -> None:
        """Switch casts on, by blocks that `make` returns, instead of those of an earlier call."""
        self.switch_casts_off()
        self._make = make
        if not self._parts:
            self._enter_block()

    def switch_casts_off(self) -> None:
        """Switch casts off until the next `switch_casts_on`."""
        self._leave_block()
        self._make = None

    def block_without_casts(self) -> AbstractContextManager[None]:
        """Run a part without casts; parts nest. Cached casts of weights are dropped."""
        return NO_CONTEXT if self._make is None else self._block_with_casts_closed()

    @contextmanager
    def _block_with_casts_closed(self) -> Iterator[None]:
        self._leave_block()
        self._parts += 1
        try:
            yield
        finally:
            self._parts -= 1
            if not self._parts:
                self._enter_block()

    def _enter_block(self) -> None:
        if self._make is not None:
            self._block = self._make()
            self._block.__enter__()

    def _leave_block(self) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            torch.clear_autocast_cache()  # a block of the script may still be open around this one


class TorchAmpByAutocast(TorchAmpStandIn):
    """The names of `torch.amp` under an arm in fp32 or with autocast; any other is refused at their first use."""

    def __init__(
        self, arm: Arm, rows: RecordedSteps | None = None, calls_apex: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(calls_apex)
        self._arm = arm
        self._rows = rows
        self._dtype: torch.dtype | None = None
        has_autocast = arm.roles is not None and arm.roles.lists == "autocast"
        if has_autocast:
            self._dtype = half_dtype_of(arm)
        self.needs_scaler, self.widens = self._dtype is torch.float16, self._dtype
        state = arm.options.get("state") if has_autocast else None
        self._state_dtype: torch.dtype | None = None if state is None else getattr(torch, state)
        # optimizers whose state is held in that type
        self._with_state: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scales = False
        self._casts = self._dtype is None
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()  # of the script
        self._losses = ScaledLossesWatch(arm)
        # Scalers that the script has on and the arm has off, with what the script may ask of one that is on.
        self._silenced: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def install(self, events: Subscriptions) -> None:
        """Replace the constructors of both classes."""
        events.wrap(*PatchPoints.MAKE_AUTOCAST, self._make_autocast_of_arm)
        events.wrap(*PatchPoints.MAKE_SCALER, self._make_scaler_of_arm)
        events.wrap(torch.amp.GradScaler, "scale", self._note_scaled_loss)
        events.wrap(torch.amp.GradScaler, "unscale_", self._refuse_unscaled_loss)
        events.wrap(torch.amp.GradScaler, "step", self._step)
        events.wrap(torch.amp.GradScaler, "update", self._note_scaler_update)
        events.wrap(torch.amp.GradScaler, "state_dict", self._shown_state_of_silenced_scaler)
        for name in SETTINGS:
            events.wrap(
                torch.amp.GradScaler,
                f"get_{name}",
                functools.partial(self._shown_setting_of_silenced_scaler, name),
            )
        events.wrap(*PatchPoints.BACKWARD, self._backward)
        self._losses.install(events)
        self._follow_optimizer_steps(events)

    def _follow_optimizer_steps(self, events: Subscriptions) -> None:
        events.call_at_end(register_optimizer_step_pre_hook(self._before_step).remove)
        events.call_at_end(register_optimizer_step_post_hook(self._after_step).remove)

    def _note_made_by_script(self, enabled: bool, scaler: Any = None) -> None:
        """Note that the script makes an object of `torch.amp`, which it may have switched off."""
        if enabled or trains_script_with_amp_off(self._arm):
            self.note_arm_acts()
        if scaler is None:
            self.script.note_autocast_made(self._arm, enabled)
        else:
            self.script.note_scaler_made(self._arm, enabled, scaler)

    def casts_now(self) -> bool:
        return (
            self.script.calls_apex() or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        )

    def find_casts_off_factory(self) -> Callable[[], Any] | None:
        return keep_fp32.make_autocast_off_factory("cuda" if torch.cuda.is_available() else "cpu")

    def note_arm_acts(self) -> None:
        """Note that the arm acts on the script."""
        if not self.script.acts:
            if self._dtype is None and self._arm.half:
                raise UnsupportedCombination.with_advice(
                    message_with_script_line(
                        f"{self._arm} needs a script that calls apex.amp, and this one does not"
                    ),
                    "native:bf16",
                )
            self.script.acts = True

    def _make_autocast_of_arm(
        self,
        original: Any,
        block: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not is_called_by_torch_or_arm():
            self._note_made_by_script(enabled)
            if enabled:
                dtype, enabled = self._dtype, self._dtype is not None
                self._casts = True
        original(block, device_type_or_cpu(device_type), dtype, enabled, cache_enabled)

    def _make_scaler_of_arm(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if not is_called_by_torch_or_arm():
            self._scalers.add(scaler)
            kwargs = scaler_settings(args, kwargs)
            self._note_made_by_script(kwargs["enabled"], scaler)
            kwargs.update({name: self._arm.options[name] for name in kwargs if name in self._arm.options})
            if kwargs["enabled"] and self._dtype is not torch.float16:
                self._silenced[scaler] = {name: kwargs[name] for name in SETTINGS}
            args, kwargs["enabled"] = (), self._dtype is torch.float16
        original(scaler, *args, **kwargs)
        if scaler in self._silenced:  # what scripts read in one that is on, for a scale of 1 that never moves
            scaler._init_scale, scaler._scale = 1.0, torch.ones(())
            scaler._growth_tracker = torch.zeros((), dtype=torch.int32)
            reset_step_state_of_scaler(scaler)

    def _note_scaled_loss(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._scales = True
        self._losses.note_loss_scaled_by(scaler)
        return original(scaler, outputs)

    def _refuse_unscaled_loss(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self.script.in_step is None and scaler in self._scalers and scaler.is_enabled():
            self._losses.require_scaled_loss(scaler)
        return original(scaler, *args, **kwargs)

    def _step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and not is_called_by_torch_or_arm():
            refuse_closure(self._arm, args, kwargs)
        return self._refuse_unscaled_loss(original, scaler, optimizer, *args, **kwargs)

    def _note_scaler_update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        self._losses.note_scaler_updated(scaler)
        return result

    def _shown_state_of_silenced_scaler(self, original: Any, scaler: Any) -> Any:
        settings = self._silenced.get(scaler)
        return original(scaler) if settings is None else {"scale": 1.0, **settings, "_growth_tracker": 0}

    def _shown_setting_of_silenced_scaler(self, name: str, original: Any, scaler: Any) -> Any:
        settings = self._silenced.get(scaler)
        return original(scaler) if settings is None else settings[name]

    def _is_without_scaler_and_record(self) -> bool:
        """Return whether the script trains without a GradScaler, and nobody records that."""
        is_without_scaler = self.script.acts and not self._scales and not self.script.steps_on_behalf
        return is_without_scaler and self._rows is not None

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_without_scaler_and_record() and self._rows is not None:
            loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
            self._rows.add_backward(number_or_detached_tensor(loss), 0, (None, None), None, [], [])
        return original(tensors, *args, **kwargs)

    def _after_step(self, optimizer: Any, *_arguments: Any) -> None:
        if self._is_without_scaler_and_record() and self._rows is not None:
            self._rows.add_step(self._rows.optimizer_number_and_is_new(optimizer)[0], True)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        self.script.refuse_step_switched_off()
        if (
            self._state_dtype is not None
            and optimizer not in self._with_state
            and not self.script.calls_apex()
        ):
            self._with_state.add(optimizer)
            hold_state_in_type(optimizer, self._state_dtype)
        if self.script.steps_on_behalf:
            return
        if self.script.acts and not self._casts:
            raise missing_autocast_error(self._arm)
        if self.script.acts and not self._scales and self._dtype is torch.float16:
            raise missing_scale_error(self._arm)


def trains_script_with_amp_off(arm: Arm) -> bool:
    """Return whether an arm trains a script whose own mixed precision is switched off."""
    return arm.spec.in_script is not None and arm.spec.in_script.acts_if_off


def device_type_or_cpu(device_type: str) -> str:
    """Return the type of the device that is there: without a GPU, casts and a scale for CUDA would be off."""
    return "cpu" if device_type == "cuda" and not torch.cuda.is_available() else device_type


def scaler_settings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a GradScaler from the arguments of its constructor, for a device that is there."""
    settings = {name: one.default for name, one in SCALER.parameters.items()}
    settings |= dict(zip(settings, args, strict=False)) | dict(kwargs)
    return {**settings, "device": device_type_or_cpu(settings["device"])}


def missing_scale_error(arm: Arm | str) -> ScalingError:
    """Return the error for a script that steps in fp16 without a scaled loss."""
    return ScalingError.with_advice(
        message_with_script_line(
            f"the script uses autocast without a GradScaler, and {arm} needs a scaled loss"
        ),
        "native:bf16",
        remedy="add `scaler = torch.amp.GradScaler()` and use it to scale, step and update",
    )


def scaled_step_error(arm: Arm | str) -> ScalingError:
    """Return the error for a script whose optimizer steps by itself, with gradients that its GradScaler has scaled."""
    return ScalingError.with_advice(
        message_with_script_line(
            f"the script's GradScaler scales the loss, and the optimizer steps without it, which {arm} cannot train"
        ),
        "native:bf16",
        remedy="call `scaler.step(optimizer)` and `scaler.update()` instead of `optimizer.step()`",
    )


def reset_step_state_of_scaler(scaler: Any) -> None:
    """Make a scaler forget which gradients it has unscaled and which optimizers it has stepped, as `update` does."""
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def refuse_closure(arm: Arm | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure that a script passes to `scaler.step`, as GradScaler does."""
    if any(map(callable, args)) or callable(kwargs.get("closure")):
        raise UnsupportedCombination(
            message_with_script_line(
                f"scaler.step is called with a closure, which {arm} does not support, since a step "
                f"may have to be skipped; call it without one"
            )
        )


def missing_autocast_error(arm: Arm | str) -> ScalingError:
    """Return the error for a script whose GradScaler works without any autocast block."""
    return ScalingError(
        message_with_script_line(
            f"the script has a GradScaler, but has entered no enabled autocast block, so {arm} casts nothing. If the "
            "script has an option that turns mixed precision on, give it"
        )
    )


def is_called_by_torch_or_arm() -> bool:
    """Return whether a precision, or torch on behalf of another block, calls the constructor that calls this."""
    name: str = calling_frame().f_globals.get("__name__", "")
    return name.startswith(("ampcompare.training.precision.", "torch.utils.checkpoint", "torch.amp."))
