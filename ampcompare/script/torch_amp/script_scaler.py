"""Every GradScaler of a script under an arm with a loss scale of its own: Apex's, or that of `half`.

The methods of `torch.amp.GradScaler` lead to the arm's gradients. What scripts read in a scaler, its settings and its
private state too, is the arm's: `_scale`, `_growth_tracker`, and what `unscale_` has found for each optimizer.
"""

import functools
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.arm import Arm
from ampcompare.base.patches import PatchPoints, Subscriptions
from ampcompare.script.torch_amp.autocast_and_scaler import (
    refuse_closure,
    reset_step_state_of_scaler,
    scaler_settings,
)
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.torch_amp.scaled_losses import ScaledLossesWatch

METHODS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict")
SETTERS = ("set_growth_factor", "set_backoff_factor", "set_growth_interval")  # which the arm decides


class ScriptScaler:
    """Stands behind all scalers of this process; the state of an update is in their own `_per_optimizer_states`."""

    def __init__(self, arm: Arm, gradients: TorchAmpStandIn, *, runs_closures: bool = False) -> None:
        self.scales = False
        self._arm = arm
        self._gradients = gradients
        self._runs_closures = runs_closures
        self._scales: weakref.WeakKeyDictionary[Any, LossScaler] = weakref.WeakKeyDictionary()
        self._losses = ScaledLossesWatch(arm)
        # unscaled, by id
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def install(self, events: Subscriptions) -> None:
        """Replace what the methods do from now on."""
        self._losses.install(events)
        events.wrap(*PatchPoints.MAKE_SCALER, self._make_enabled_scaler)
        for name in METHODS:
            events.wrap(
                torch.amp.GradScaler,
                name,
                functools.partial(self._call_behind_scaler, getattr(self, f"_{name.strip('_')}")),
            )
        for name in SETTERS:
            events.wrap(
                torch.amp.GradScaler, name, functools.partial(self._call_behind_scaler, lambda *_: None)
            )

    def _make_enabled_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        settings = scaler_settings(args, kwargs)
        self._gradients.note_scaler_made(scaler, settings["enabled"])
        original(scaler, **{**settings, "enabled": True})  # a script in bf16 has one that is off

    def _call_behind_scaler(self, method: Any, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._gradients.leaves_scaler_alone() or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        return method(scaler, self._loss_scaler_with_written_scale(scaler), *args, **kwargs)

    def _loss_scaler_with_written_scale(self, scaler: Any) -> LossScaler:
        """Return the loss scale of a scaler, with what the script has written into its `_scale`."""
        scale = self._scales.get(scaler)
        if scale is None:
            scale = self._scales[scaler] = _make_loss_scaler_of_arm(self._arm)
            scaler._growth_factor, scaler._backoff_factor = 2.0, 0.5
            scaler._growth_interval, scaler._init_scale = scale._scale_seq_len, scale.loss_scale()
            self._write_scale_into_scaler(scaler, scale)
        elif (written := float(scaler._scale)) != scale.loss_scale():
            scale._loss_scale = written
        return scale

    def _write_scale_into_scaler(self, scaler: Any, scale: LossScaler) -> None:
        scaler._scale = torch.tensor(scale.loss_scale(), dtype=torch.float32)
        scaler._growth_tracker = torch.tensor(scale._unskipped, dtype=torch.int32)

    def _scale(self, scaler: Any, scale: LossScaler, outputs: Any) -> Any:
        self.scales = True
        if not isinstance(outputs, Tensor):
            return type(outputs)(self._scale(scaler, scale, output) for output in outputs)
        stages = [state["stage"] for state in scaler._per_optimizer_states.values()]
        self._gradients.prepare_scaled_pass(unscaled=OptState.UNSCALED in stages)
        self._losses.note_loss_scaled_by(scaler)
        return outputs.float() * scale.loss_scale()

    def _unscale(self, scaler: Any, scale: LossScaler, optimizer: Any) -> None:
        state = scaler._per_optimizer_states[id(optimizer)]
        self._gradients.check_can_unscale(optimizer)
        self._losses.require_scaled_loss(scaler)
        if state["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        overflow = self._gradients.unscale_and_find_overflow(optimizer, scale)
        device = optimizer.param_groups[0]["params"][0].device
        state["found_inf_per_device"] = {device: torch.tensor(float(overflow))}
        state["stage"] = OptState.UNSCALED
        self._optimizers[id(optimizer)] = optimizer

    def _step(self, scaler: Any, scale: LossScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._runs_closures and (args or kwargs):
            return optimizer.step(*args, **kwargs)
        refuse_closure(self._arm, args, kwargs)
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._unscale(scaler, scale, optimizer)
        state["stage"] = OptState.STEPPED
        if _is_overflow_in_scaler_state(state):
            return self._gradients.end_update_without_step(optimizer)
        return self._gradients.step_with_true_gradients(optimizer, *args, **kwargs)

    def _update(self, scaler: Any, scale: LossScaler, new_scale: Any = None) -> None:
        states: dict[int, Any] = scaler._per_optimizer_states
        for number, state in states.items():
            if (
                state["stage"] is OptState.UNSCALED
                and (optimizer := self._optimizers.get(number)) is not None
            ):
                self._gradients.end_update_without_step(optimizer)
        if new_scale is not None:
            scale._loss_scale = float(new_scale)
        elif any(state["stage"] is not OptState.READY for state in states.values()):
            scale._has_overflow = any(map(_is_overflow_in_scaler_state, states.values()))
            scale.update_scale()
        reset_step_state_of_scaler(scaler)
        self._losses.note_scaler_updated(scaler)
        self._write_scale_into_scaler(scaler, scale)

    def _get_scale(self, scaler: Any, scale: LossScaler) -> float:
        return scale.loss_scale()

    def _state_dict(self, scaler: Any, scale: LossScaler) -> dict[str, Any]:
        settings = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": scale._scale_seq_len}
        return {"scale": scale.loss_scale(), **settings, "_growth_tracker": scale._unskipped}

    def _load_state_dict(self, scaler: Any, scale: LossScaler, state: dict[str, Any]) -> None:
        scale._loss_scale, scale._unskipped = float(state["scale"]), int(state["_growth_tracker"])
        self._write_scale_into_scaler(scaler, scale)


def _make_loss_scaler_of_arm(arm: Arm) -> LossScaler:
    """Return what moves a loss scale as the arm declares it."""
    declared = None if arm.roles is None else arm.roles.loss_scale
    if declared is None or declared.interval is None:
        return LossScaler(1.0 if declared is None else declared.first)
    return LossScaler(
        "dynamic",
        declared.first,
        scale_window=declared.interval,
        min_loss_scale=declared.lowest,
        max_loss_scale=math.inf if declared.highest is None else declared.highest,
    )


def _is_overflow_in_scaler_state(state: dict[str, Any]) -> bool:
    found: dict[Any, Tensor] = state["found_inf_per_device"]
    return any(map(bool, found.values()))
