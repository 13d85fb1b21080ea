"""`apex:O1` or `O4` behind `torch.autocast` and `GradScaler`: casts inside the blocks, Apex's scaler in the scaler.

Neither needs a model.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.apex_levels import level_with_overrides
from ampcompare.backends.arm import Arm
from ampcompare.base.patches import PatchPoints, Subscriptions
from ampcompare.script.torch_amp.autocast_and_scaler import (
    device_type_or_cpu,
    is_called_by_torch_or_arm,
    missing_autocast_error,
    missing_scale_error,
)
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.torch_amp.script_scaler import ScriptScaler
from ampcompare.training.precision.base import owned_params
from ampcompare.training.precision.keep_fp32 import make_o1_casts_off_factory


class TorchAmpByO1(TorchAmpStandIn):
    """Replaces what both classes do; O1's patches of torch are on from the first block of the script on."""

    needs_scaler = True
    casts_loss = True

    def __init__(self, arm: Arm, calls_apex: Callable[[], bool] = lambda: False) -> None:
        super().__init__(calls_apex)
        self._level = level_with_overrides(arm.options)
        self._name = f"apex:{arm.options['opt_level']}"
        if (outputs := arm.options.get("cast_model_outputs")) is not None:
            self.outputs = getattr(torch, outputs)
        self._scaler = ScriptScaler(arm, self)
        self._handle: Any = None
        self._depth = 0

    def install(self, events: Subscriptions) -> None:
        """Replace the methods of both classes."""
        events.wrap(*PatchPoints.ENTER_AUTOCAST, self._enter_autocast)
        events.wrap(*PatchPoints.LEAVE_AUTOCAST, self._leave_autocast)
        events.wrap(*PatchPoints.MAKE_AUTOCAST, self._make_autocast_of_o1)
        self._scaler.install(events)
        events.wrap(checkpoint, "_get_autocast_kwargs", self._checkpoint_under_casts)
        events.call_at_end(register_optimizer_step_pre_hook(self._refuse_unscaled_step).remove)
        events.call_at_end(self._deactivate_patches)

    def _deactivate_patches(self) -> None:
        if self._handle is not None:
            self._handle._deactivate()

    def _make_autocast_of_o1(
        self, original: Any, block: Any, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        original(block, device_type_or_cpu(device_type), *args, **kwargs)
        if not is_called_by_torch_or_arm():  # a checkpoint makes one to compute again what the arm has cast
            self.script.note_autocast_made(self._name, block._enabled)

    def _checkpoint_under_casts(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Let what a checkpoint computes again run under O1's casts if it did so before."""
        kinds = original(*args, **kwargs)
        for kind in kinds:
            if kind is not None:
                kind["enabled"] = self._handle is not None and self._handle._is_active
        return kinds

    def casts_now(self) -> bool:
        return self._handle is not None and bool(self._handle._is_active)

    def casts_functions_now(self) -> bool:
        return self.casts_now()

    @contextlib.contextmanager
    def block_casting_functions(self, on: bool) -> Iterator[None]:
        self.note_optimizer_made()
        before, self._handle._is_active = self._handle._is_active, on
        self._handle._clear_cache()
        try:
            yield
        finally:
            self._handle._is_active = before
            self._handle._clear_cache()

    def find_casts_off_factory(self) -> Callable[[], Any]:
        return make_o1_casts_off_factory(importlib.import_module("ampcompare.apex.amp"))

    def forget_weight_casts(self) -> None:
        if self._handle is not None:
            self._handle._clear_cache()

    def _refuse_unscaled_step(self, optimizer: Any, *_arguments: Any) -> None:
        self.script.refuse_step_switched_off()
        if self.script.acts and not self._scaler.scales and not self.script.steps_on_behalf:
            raise missing_scale_error(self._name)

    def note_optimizer_made(self) -> None:
        """Patch torch before the first forward pass: a call looks up a loss function before its arguments."""
        if self._handle is None:
            # the package refuses the script's own call
            amp = importlib.import_module("ampcompare.apex.amp.amp")
            self._handle = amp.init(verbose=False, _half_dtype=getattr(torch, self._level.half_dtype))
            self._handle._is_active = False

    def _enter_autocast(self, original: Any, block: Any) -> Any:
        self.note_optimizer_made()
        self.script.acts = self.script.acts or block._enabled
        self.num_blocks += block._enabled
        self._depth += 1
        block._ampcompare_before = self._handle._is_active
        self._handle._is_active = bool(block._enabled)
        return block

    def _leave_autocast(self, original: Any, block: Any, *_exception: Any) -> None:
        self._depth -= 1
        self._handle._is_active = block._ampcompare_before
        if not self._depth:
            self._handle._clear_cache()

    # What the scalers do.

    def note_scaler_made(self, scaler: Any, enabled: bool) -> None:
        self.script.note_scaler_made(self._name, enabled, scaler)

    def check_can_unscale(self, optimizer: Any) -> None:
        if not self.script.acts:
            raise missing_autocast_error(self._name)

    @torch.no_grad()
    def unscale_and_find_overflow(self, optimizer: Any, scaler: LossScaler) -> bool:
        scaler.clear_overflow_state()
        scaler.unscale_([param.grad for param in owned_params(optimizer) if param.grad is not None])
        return scaler._read_overflow_flags()
