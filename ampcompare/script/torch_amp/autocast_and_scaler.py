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
from torch import Tensor, nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ScalingError, UnsupportedCombination
from ampcompare.base.patches import Points, Subscriptions, calling_frame
from ampcompare.guards.location import here
from ampcompare.script.recording.recorder import Rows, value_of
from ampcompare.training.precision.base import NO_CONTEXT, half_dtype_of
from ampcompare.training.precision.half import hold_state_in

SCALER = inspect.signature(torch.amp.GradScaler)
SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


class Casting:
    """One autocast block that stays open, and the parts of a script without it.

    The block is left and made again, not nested: only at the outermost exit does torch drop the casts of weights that
    it has cached.
    """

    def __init__(self) -> None:
        self._make: Callable[[], torch.autocast] | None = None
        self._block: torch.autocast | None = None
        self._parts = 0

    def type_now(self) -> torch.dtype | None:
        """Return the type that functions are cast to; None where casts are off."""
        if self._block is None or not torch.is_autocast_enabled(self._block.device):
            return None
        return torch.get_autocast_dtype(self._block.device)

    def start(self, make: Callable[[], torch.autocast]) -> None:
        """Switch casts on, by blocks that `make` returns, instead of those of an earlier call."""
        self.end()
        self._make = make
        if not self._parts:
            self._enter()

    def end(self) -> None:
        """Switch casts off until the next `start`."""
        self._close()
        self._make = None

    def off(self) -> AbstractContextManager[None]:
        """Run a part without casts; parts nest. Cached casts of weights are dropped."""
        return NO_CONTEXT if self._make is None else self._without()

    @contextmanager
    def _without(self) -> Iterator[None]:
        self._close()
        self._parts += 1
        try:
            yield
        finally:
            self._parts -= 1
            if not self._parts:
                self._enter()

    def _enter(self) -> None:
        if self._make is not None:
            self._block = self._make()
            self._block.__enter__()

    def _close(self) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            torch.clear_autocast_cache()  # a block of the script may still be open around this one


class TorchAmpStandIn:
    """What stands behind `torch.amp`.

    Attributes:
        used: the script, or what drives it, has entered an autocast block or made a GradScaler.
        has_autocast: the script itself has made an enabled autocast block.
        has_scaler: the script itself has made a GradScaler that is on.
        off_scalers: GradScalers that the script itself has made and switched off.
        is_initialized: the script has called `amp.initialize`, which this arm stands behind.
        driven: objects of `torch.amp` are made on behalf of the script at present.
        is_driven: the steps of the script are made and recorded on its behalf; what they lack is no fault of it.
        needs_scaler: the arm scales the loss, or moves gradients to master weights.
        casts_loss: casts act on all that the script computes, as O1's do, not on modules alone.
        casts_weights: the arm acts by casting the weights of models, so not on modules whose weights no optimizer has.
        steps_copies: optimizers step other tensors than the weights of models: masters, or copies made for a step.
        copies_in_steps: those copies last for one step, so that no model has what a step writes before it ends.
        steps_again: a second step by the gradients of the last one moves these on too, without a step of a scaler.
        widens: the type of the outputs of modules that become fp32; None where the arm does that itself, or not at all.
        in_step: the optimizer whose step evaluates losses by itself at present, with gradients scaled for it.
        outputs: the type that the outputs of models get where the arm casts; None if they keep theirs.
        num_blocks: autocast blocks that were entered, of an arm with `outputs`.
    """

    needs_scaler = casts_loss = casts_weights = steps_copies = copies_in_steps = False
    steps_again = True
    widens: torch.dtype | None = None
    outputs: torch.dtype | None = None
    num_blocks = 0

    def __init__(self, initialized: Callable[[], bool]) -> None:
        self._initialized = initialized
        self.is_initialized = False
        self.used = self.has_autocast = self.has_scaler = self.driven = self.is_driven = False
        self.off_scalers: list[Any] = []
        self.in_step: Any = None
        self._off: str | None = None

    def note_made(self, arm: Arm | str, enabled: bool, scaler: Any = None) -> None:
        """Note that a GradScaler or an autocast block is made, by the script or on its behalf."""
        if scaler is None:
            self.has_autocast = self.has_autocast or (enabled and not self.driven)
        elif not self.driven:
            self.has_scaler = self.has_scaler or enabled
            if not enabled:
                self.off_scalers.append(scaler)
        if not enabled and not self.used and self._off is None:
            self._off = switched_off(arm)

    def refuse_off(self) -> None:
        """Refuse a step of a script that has switched its mixed precision off."""
        if self._off is not None and not self.used and not self._initialized():
            raise UnsupportedCombination(self._off)

    def install(self, events: Subscriptions) -> None:
        """Begin."""

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Prepare models and optimizers that the script names."""
        self.is_initialized = self.has_autocast = True
        self.use()

    @contextmanager
    def on_behalf(self) -> Iterator[None]:
        """Run a block that makes objects of `torch.amp` for the script."""
        self.driven = True
        try:
            yield
        finally:
            self.driven = False

    def is_by_apex(self) -> bool:
        """Return whether the script trains through `apex.amp`."""
        return self._initialized()

    def optimizer_made(self) -> None:
        """Note that the script has made an optimizer."""

    def casts_now(self) -> bool:
        """Return whether operations are cast at present."""
        return False

    def forget_casts(self) -> None:
        """Cast weights again at their next use: a backward pass has freed the graph of their casts."""

    def use(self) -> None:
        """Note that the arm acts on the script."""
        self.used = True

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the weights of models in whose place an optimizer has other tensors at present, with those."""
        return []

    def input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return the type of the inputs of a part of a model that the script calls by itself; None for others."""
        return None

    def alike(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a module without weights that the script calls, in types that fit one another."""
        return args, kwargs

    def take_back(self, optimizer: Any) -> None:
        """Let weights have the gradients of their masters as their own: a backward pass is about to add to them."""

    def forget_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """Let gradients be unscaled once more before the step."""
        scaler._per_optimizer_states.pop(id(optimizer), None)

    # What `ScriptScaler` asks of an arm with a loss scale of its own.

    def scaler_made(self, scaler: Any, enabled: bool) -> None:
        """Note that the script has made a scaler, or that it was made on its behalf."""

    def is_left_alone(self) -> bool:
        """Return whether GradScaler is torch's own by now: the script trains through `apex.amp`."""
        return False

    def before_scale(self, *, unscaled: bool) -> None:
        """Prepare for the backward pass of a loss; `unscaled` gradients of an optimizer may wait for its step."""

    def check_unscale(self, optimizer: Any) -> None:
        """Raise if the gradients of `optimizer` cannot be those of a scaled loss under the arm."""

    def unscale(self, optimizer: Any, scaler: Any) -> bool:
        """Give what the optimizer steps true gradients, by a `LossScaler`, and return whether one overflowed."""
        raise NotImplementedError

    def apply(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer whose gradients are true."""
        return optimizer.step(*args, **kwargs)

    def step_as_written(self, optimizer: Any, step: Any) -> Any:
        """Return the step of an optimizer that evaluates losses by itself, without what the arm has put around it."""
        return step

    def skip(self, optimizer: Any) -> None:
        """End an update of an optimizer without a step."""


def losses_on_copies(optimizer: Any, arm: Arm) -> UnsupportedCombination:
    """Return the refusal of a step that evaluates losses by itself under an arm that makes copies for each step."""
    return UnsupportedCombination(
        here(
            f"the step of {type(optimizer).__name__} evaluates losses by itself, and {arm} steps fp32 copies of the "
            "weights that it makes for each step, so that the model would not see what the step writes before it ends"
        )
    )


class TorchAmp(TorchAmpStandIn):
    """The names of `torch.amp` under an arm in fp32 or with autocast; any other is refused at their first use."""

    def __init__(self, arm: Arm, rows: Rows | None = None, initialized: Callable[[], bool] = lambda: False) -> None:
        super().__init__(initialized)
        self._arm = arm
        self._rows = rows
        self._dtype: torch.dtype | None = None
        has_autocast = arm.roles is not None and arm.roles.lists == "autocast"
        if has_autocast:
            self._dtype = half_dtype_of(arm)
        self.needs_scaler, self.widens = self._dtype is torch.float16, self._dtype
        state = arm.options.get("state") if has_autocast else None
        self._state_dtype: torch.dtype | None = None if state is None else getattr(torch, state)
        self._with_state: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose state is held in that type
        self._scales = False
        self._casts = self._dtype is None
        self._scalers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # Scalers that the script has on and the arm has off, with what the script may ask of one that is on.
        self._silenced: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def install(self, events: Subscriptions) -> None:
        """Replace the constructors of both classes."""
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(*Points.MAKE_SCALER, self._make_scaler)
        events.wrap(torch.amp.GradScaler, "scale", self._scale)
        events.wrap(torch.amp.GradScaler, "unscale_", self._use_scaled)
        events.wrap(torch.amp.GradScaler, "step", self._step)
        events.wrap(torch.amp.GradScaler, "update", self._update)
        events.wrap(torch.amp.GradScaler, "state_dict", self._state_dict)
        for name in SETTINGS:
            events.wrap(torch.amp.GradScaler, f"get_{name}", functools.partial(self._setting, name))
        events.wrap(*Points.BACKWARD, self._backward)
        self._watch_steps(events)

    def _watch_steps(self, events: Subscriptions) -> None:
        events.at_end(register_optimizer_step_pre_hook(self._before_step).remove)
        events.at_end(register_optimizer_step_post_hook(self._after_step).remove)

    def _note(self, enabled: bool, scaler: Any = None) -> None:
        """Note that the script makes an object of `torch.amp`, which it may have switched off."""
        if enabled or acts_if_off(self._arm):
            self.use()
        self.note_made(self._arm, enabled, scaler)

    def casts_now(self) -> bool:
        return self._initialized() or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")

    def use(self) -> None:
        """Note that the arm acts on the script."""
        if not self.used:
            if self._dtype is None and self._arm.half:
                raise UnsupportedCombination(
                    here(
                        f"{self._arm} needs a script that calls apex.amp, and this one does not; compare native:bf16, "
                        "or another arm"
                    )
                )
            self.used = True

    def _make_autocast(
        self,
        original: Any,
        block: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not is_own():
            self._note(enabled)
            if enabled:
                dtype, enabled = self._dtype, self._dtype is not None
                self._casts = True
        original(block, present(device_type), dtype, enabled, cache_enabled)

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if not is_own():
            self._scalers[scaler] = False
            kwargs = scaler_settings(args, kwargs)
            self._note(kwargs["enabled"], scaler)
            kwargs.update({name: self._arm.options[name] for name in kwargs if name in self._arm.options})
            if kwargs["enabled"] and self._dtype is not torch.float16:
                self._silenced[scaler] = {name: kwargs[name] for name in SETTINGS}
            args, kwargs["enabled"] = (), self._dtype is torch.float16
        original(scaler, *args, **kwargs)
        if scaler in self._silenced:  # what scripts read in one that is on, for a scale of 1 that never moves
            scaler._init_scale, scaler._scale = 1.0, torch.ones(())
            scaler._growth_tracker = torch.zeros((), dtype=torch.int32)
            forget_steps(scaler)

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._scales = True
        if scaler in self._scalers:
            self._scalers[scaler] = True
        return original(scaler, outputs)

    def _use_scaled(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_step is None and not self._scalers.get(scaler, True) and scaler.is_enabled():
            raise not_scaled(self._arm)
        return original(scaler, *args, **kwargs)

    def _step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and not is_own():
            refuse_closure(self._arm, args, kwargs)
        return self._use_scaled(original, scaler, optimizer, *args, **kwargs)

    def _update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler in self._scalers:
            self._scalers[scaler] = False
        return result

    def _state_dict(self, original: Any, scaler: Any) -> Any:
        settings = self._silenced.get(scaler)
        return original(scaler) if settings is None else {"scale": 1.0, **settings, "_growth_tracker": 0}

    def _setting(self, name: str, original: Any, scaler: Any) -> Any:
        settings = self._silenced.get(scaler)
        return original(scaler) if settings is None else settings[name]

    def _is_plain(self) -> bool:
        """Return whether the script trains without a GradScaler, and nobody records that."""
        return not self.is_driven and self.used and not self._scales and self._rows is not None

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain() and self._rows is not None:
            loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
            self._rows.add_backward(value_of(loss), 0, (None, None), None, [], [])
        return original(tensors, *args, **kwargs)

    def _after_step(self, optimizer: Any, *_arguments: Any) -> None:
        if self._is_plain() and self._rows is not None:
            self._rows.add_step(self._rows.number(optimizer)[0], True)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        self.refuse_off()
        if self._state_dtype is not None and not self._initialized() and optimizer not in self._with_state:
            self._with_state.add(optimizer)
            hold_state_in(optimizer, self._state_dtype)
        if self.is_driven:
            return
        if self.used and not self._casts:
            raise without_autocast(self._arm)
        if self.used and not self._scales and self._dtype is torch.float16:
            raise missing_scale(self._arm)


def acts_if_off(arm: Arm) -> bool:
    """Return whether an arm trains a script whose own mixed precision is switched off."""
    return arm.spec.in_script is not None and arm.spec.in_script.acts_if_off


def present(device_type: str) -> str:
    """Return the type of the device that is there: without a GPU, casts and a scale for CUDA would be off."""
    return "cpu" if device_type == "cuda" and not torch.cuda.is_available() else device_type


def scaler_settings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a GradScaler from the arguments of its constructor, for a device that is there."""
    settings = {name: one.default for name, one in SCALER.parameters.items()}
    settings |= dict(zip(settings, args, strict=False)) | dict(kwargs)
    return {**settings, "device": present(settings["device"])}


def switched_off(arm: Arm | str) -> str:
    """Return the message for a script that trains with `torch.amp` switched off."""
    return here(
        f"the script makes autocast or GradScaler with enabled=False, so {arm} has no effect; run it with its own "
        f"option "
        "for mixed precision, such as --amp"
    )


def missing_scale(arm: Arm | str) -> ScalingError:
    """Return the error for a script that steps in fp16 without a scaled loss."""
    return ScalingError(
        here(
            f"the script uses autocast without a GradScaler, and {arm} needs a scaled loss: add "
            "`scaler = torch.amp.GradScaler()` and use it to scale, step and update, or compare native:bf16"
        )
    )


def forget_steps(scaler: Any) -> None:
    """Make a scaler forget which gradients it has unscaled and which optimizers it has stepped, as `update` does."""
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def not_scaled(arm: Arm | str) -> ScalingError:
    """Return the error for a scaler that is to unscale gradients of a loss that it has not scaled."""
    return ScalingError(
        here(
            f"the scaler divides gradients by its scale, but has scaled no loss since its last update, so under {arm} "
            f"they would vanish: call scaler.scale(loss).backward() instead of loss.backward()"
        )
    )


def refuse_closure(arm: Arm | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure that a script passes to `scaler.step`, as GradScaler does."""
    if any(map(callable, args)) or callable(kwargs.get("closure")):
        raise UnsupportedCombination(
            here(
                f"scaler.step is called with a closure, which {arm} does not support, since a step "
                f"may have to be skipped; call it without one"
            )
        )


def without_autocast(arm: Arm | str) -> ScalingError:
    """Return the error for a script whose GradScaler works without any autocast block."""
    return ScalingError(
        here(
            f"the script has a GradScaler, but has entered no enabled autocast block, so {arm} casts nothing. If the "
            "script has an option that turns mixed precision on, give it"
        )
    )


def is_own() -> bool:
    """Return whether a precision, or torch on behalf of another block, calls the constructor that calls this."""
    name: str = calling_frame().f_globals.get("__name__", "")
    return name.startswith(("ampcompare.training.precision.", "torch.utils.checkpoint", "torch.amp."))
