"""`apex:O1` or `O4` behind `torch.autocast` and `GradScaler`: casts inside the blocks, Apex's scaler in the scaler.

Neither needs a model. Each `scaler.step` checks and unscales its optimizer; `scaler.update` moves Apex's scale once.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.guards.events import Points, Subscriptions
from ampcompare.script.apex_amp import Given
from ampcompare.script.torch_amp.autocast_and_scaler import (
    TorchNames,
    is_own,
    not_scaled,
    present,
    refuse_closure,
    scaler_settings,
    switched_off,
    unscaled,
    without_autocast,
)
from ampcompare.training.precision.base import owned_params

__all__ = ["O1BehindTorch"]


@dataclasses.dataclass
class _State:
    """Of one GradScaler, since the last update.

    Attributes:
        scaler: of Apex.
        scaled: whether it has scaled a loss.
        overflows: per optimizer, whether its gradients overflowed.
    """

    scaler: LossScaler
    scaled: bool = False
    overflows: dict[int, bool] = dataclasses.field(default_factory=dict)


class O1BehindTorch(TorchNames):
    """Replaces what both classes do; O1's patches of torch are on from the first block of the script on.

    Args:
        arm: `apex:O1`, or `apex:O4`, whose loss scale is 1.
        given: called with the first optimizer before its first step.
        initialized: returns whether the script trains through `apex.amp`.
    """

    needs_scaler = True
    casts_loss = True

    def __init__(
        self,
        arm: Arm,
        given: Given | None = None,
        initialized: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(initialized)
        level = apex_level(arm.options)
        self._name = f"apex:{arm.options['opt_level']}"
        self._loss_scale = level.loss_scale
        self._half_dtype: torch.dtype = getattr(torch, level.half_dtype)
        self._given = given
        self._off: str | None = None
        self._scales = False
        self._handle: Any = None
        self._depth = 0

    def install(self, events: Subscriptions) -> None:
        """Replace the methods of both classes."""
        events.wrap(*Points.ENTER_AUTOCAST, self._enter)
        events.wrap(*Points.LEAVE_AUTOCAST, self._exit)
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(*Points.MAKE_SCALER, self._make_scaler)
        for name in ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict"):
            events.wrap(torch.amp.GradScaler, name, getattr(self, f"_{name.rstrip('_')}"))
        events.wrap(checkpoint, "_get_autocast_kwargs", self._casts_of_checkpoint)
        events.at_end(register_optimizer_step_pre_hook(self._before_step).remove)
        events.at_end(self._deactivate)

    def _deactivate(self) -> None:
        if self._handle is not None:
            self._handle._deactivate()

    def _make_autocast(self, original: Any, block: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(block, present(device_type), *args, **kwargs)
        if not is_own():  # a checkpoint makes one to compute again what the arm has cast
            self._note(block._enabled)

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        settings = scaler_settings(args, kwargs)
        self._note(settings["enabled"], scaler)
        original(scaler, **{**settings, "enabled": True})  # a script in bf16 has one that is off

    def _casts_of_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Let what a checkpoint computes again run under O1's casts if it did so before."""
        kinds = original(*args, **kwargs)
        for kind in kinds:
            if kind is not None:
                kind["enabled"] = self._handle is not None and self._handle._is_active
        return kinds

    def casts_now(self) -> bool:
        return self._handle is not None and bool(self._handle._is_active)

    def forget_unscaled(self, scaler: Any, optimizer: Any) -> None:
        self._of(scaler).overflows.pop(id(optimizer), None)

    def _note(self, enabled: bool, scaler: Any = None) -> None:
        if scaler is not None:
            self.note_scaler(scaler, enabled)
        elif not self.driven:
            self.has_autocast = self.has_autocast or enabled
        if not enabled and not self.used and self._off is None:
            self._off = switched_off(self._name)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        if not self.used:
            if self._off is not None and not self._initialized():
                raise UnsupportedCombination(self._off)
            return
        if not self._scales and not self.is_driven:
            raise unscaled(self._name)
        if self._given is not None:
            self._given([], [optimizer])
            self._given = None

    def optimizer_made(self) -> None:
        """Patch torch before the first forward pass: a call looks up a loss function before its arguments."""
        if self._handle is None:
            amp = importlib.import_module("ampcompare.apex.amp")
            self._handle = amp.init(verbose=False, _half_dtype=self._half_dtype)
            self._handle._is_active = False

    def _enter(self, original: Any, block: Any) -> Any:
        self.optimizer_made()
        self.used = self.used or block._enabled
        self._depth += 1
        block._ampcompare_before = self._handle._is_active
        self._handle._is_active = bool(block._enabled)
        return block

    def _exit(self, original: Any, block: Any, *_exception: Any) -> None:
        self._depth -= 1
        self._handle._is_active = block._ampcompare_before
        if not self._depth:
            self._handle._clear_cache()

    def _of(self, scaler: Any) -> _State:
        state: _State | None = scaler.__dict__.get("_ampcompare_state")
        if state is None:
            state = scaler.__dict__["_ampcompare_state"] = _State(LossScaler(self._loss_scale))
        return state

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._scales = True
        if not scaler.is_enabled():
            return outputs
        self._of(scaler).scaled = True
        if isinstance(outputs, Tensor):
            return outputs.float() * self._of(scaler).scaler.loss_scale()
        return type(outputs)(self._scale(original, scaler, output) for output in outputs)

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> None:
        if not scaler.is_enabled():
            return
        state = self._of(scaler)
        if not self.used:
            raise without_autocast(self._name)
        if not state.scaled:
            raise not_scaled(self._name)
        if id(optimizer) in state.overflows:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        grads = [param.grad for param in owned_params(optimizer) if param.grad is not None]
        state.scaler.clear_overflow_state()
        with torch.no_grad():
            state.scaler.unscale_(grads)
        state.overflows[id(optimizer)] = state.scaler._read_flags()

    def _step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return optimizer.step(*args, **kwargs)
        refuse_closure(self._name, args, kwargs)
        state = self._of(scaler)
        if id(optimizer) not in state.overflows:
            self._unscale(original, scaler, optimizer)
        return None if state.overflows[id(optimizer)] else optimizer.step(*args, **kwargs)

    def _update(self, original: Any, scaler: Any, new_scale: Any = None) -> None:
        if not scaler.is_enabled():
            return
        state = self._of(scaler)
        if new_scale is not None:
            state.scaler._loss_scale = float(new_scale)
        else:
            state.scaler._has_overflow = any(state.overflows.values())
            state.scaler.update_scale()
        state.overflows.clear()
        state.scaled = False

    def _get_scale(self, original: Any, scaler: Any) -> float:
        return self._of(scaler).scaler.loss_scale() if scaler.is_enabled() else 1.0

    def _state_dict(self, original: Any, scaler: Any) -> dict[str, Any]:
        if not scaler.is_enabled():
            return {}
        own = self._of(scaler).scaler
        settings = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": own._scale_seq_len}
        return {"scale": own.loss_scale(), **settings, "_growth_tracker": own._unskipped}

    def _load_state_dict(self, original: Any, scaler: Any, state: dict[str, Any]) -> None:
        if scaler.is_enabled():
            own = self._of(scaler).scaler
            own._loss_scale, own._unskipped = float(state["scale"]), int(state["_growth_tracker"])
