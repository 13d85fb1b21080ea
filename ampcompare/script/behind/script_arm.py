"""The arm `script`: `apex.amp` and `torch.amp` as the script uses them, followed for the record alone."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.backends.arm import Arm
from ampcompare.base.patches import PatchPoints, Subscriptions
from ampcompare.script.behind.side import ScriptProcessContext, as_list
from ampcompare.script.imports.fp16_classes import fp16_optimizer_classes
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn


def prepare_torch_amp_stand_in(arm: Arm, side: ScriptProcessContext) -> TorchAmpStandIn:
    """Record the weights that `amp.initialize` gets, and return what follows `torch.amp`."""
    frontend = importlib.import_module("apex.amp.frontend")
    side.events.wrap(frontend, "_initialize", functools.partial(_initialize_with_weights_recorded, side))
    return TorchAmpAsWritten(side.has_initialized, side.rows)


def _initialize_with_weights_recorded(
    side: ScriptProcessContext, original: Any, models: Any, optimizers: Any, *args: Any, **kwargs: Any
) -> Any:
    side.record_weights(as_list(models), as_list(optimizers))
    return original(models, optimizers, *args, **kwargs)


class TorchAmpAsWritten(TorchAmpStandIn):
    """Follows `torch.autocast` and `GradScaler` of a script; a scaler that is off leaves it one without a scaler."""

    def __init__(self, calls_apex: Callable[[], bool], rows: RecordedSteps | None) -> None:
        super().__init__(calls_apex)
        self._rows = rows
        self._by_optimizer = False

    def install(self, events: Subscriptions) -> None:
        """Note uses from now on."""
        events.wrap(*PatchPoints.MAKE_AUTOCAST, self._note_autocast_made)
        events.wrap(*PatchPoints.MAKE_SCALER, self._note_scaler_made)
        events.wrap(torch.amp.GradScaler, "scale", self._note_scaled_loss)
        for kind in fp16_optimizer_classes():
            events.wrap(kind, "__init__", self._note_optimizer_made)
        events.call_at_end(register_optimizer_step_pre_hook(lambda *_: self.note_arm_acts()).remove)

    def _note_autocast_made(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        self.script.has_autocast = self.script.has_autocast or block._enabled

    def _note_scaler_made(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if not scaler.is_enabled() and self._rows is not None:
            self._rows.ignored.add(scaler)  # its steps are those of the optimizer

    def _note_scaled_loss(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self.script.has_scaler = self.script.has_scaler or scaler.is_enabled()
        return original(scaler, outputs)

    def _note_optimizer_made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._by_optimizer = True
        original(optimizer, *args, **kwargs)

    def trains_through_apex(self) -> bool:
        """Return whether the script trains through Apex, or the adapter in its place, which is recorded there."""
        is_recorded = self._rows is not None and self._rows.has_initialized
        return self.script.calls_apex() or self._by_optimizer or is_recorded
