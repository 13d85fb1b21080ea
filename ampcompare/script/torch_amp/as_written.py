"""The arm `script`: notes what precision a script has by itself, and changes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.guards.events import Points, Subscriptions
from ampcompare.precision.base import owned_params
from ampcompare.script.apex_amp.amp import Given
from ampcompare.script.legacy.record.rows import Rows
from ampcompare.script.torch_amp.names import TorchNames

__all__ = ["AsWritten"]


class AsWritten(TorchNames):
    """Follows `torch.autocast` and `GradScaler` of a script.

    Args:
        rows: get a note of the script's precision at the first step; None records nothing.
        given: called with the first optimizer before its first step.
        initialized: returns whether the script trains through `apex.amp`.
    """

    def __init__(self, rows: Rows | None, given: Given, initialized: Callable[[], bool]) -> None:
        super().__init__(initialized)
        self._rows = rows
        self._given: Given | None = given
        self._casts = ""
        self._by_optimizer = False

    def install(self, events: Subscriptions) -> None:
        """Note uses from now on."""
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(torch.amp.GradScaler, "scale", self._scale)
        for name in ("apex.fp16_utils", "apex.contrib.optimizers.fp16_optimizer"):
            with suppress(ImportError):  # a build of the real Apex without the second
                kind = importlib.import_module(name).FP16_Optimizer
                events.wrap(kind, "__init__", self._make_optimizer)
        events.at_end(register_optimizer_step_pre_hook(self._before_step).remove)

    def _make_autocast(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        if block._enabled and not self._casts:
            self.has_autocast = True
            self._casts = str(block.fast_dtype).removeprefix("torch.")

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self.has_scaler = True
        return original(scaler, outputs)

    def _make_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._by_optimizer = True
        original(optimizer, *args, **kwargs)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        given, self._given = self._given, None
        if given is None:
            return
        self.used = True
        if not self._initialized():  # which notes them before it casts
            given([], [optimizer])
        if self._rows is not None and (own := self._own(optimizer)):
            self._rows.add_note(f"the script's own precision: {own}")

    def _own(self, optimizer: Any) -> str:
        """Return the precision that the script has by itself; "" for fp32."""
        if self._initialized():
            return f"apex.amp {importlib.import_module('apex.amp')._amp_state.opt_properties.opt_level}"
        if self._by_optimizer:
            return "FP16_Optimizer"
        held = {str(param.dtype).removeprefix("torch.") for param in owned_params(optimizer)} - {"float32"}
        parts = [f"{' and '.join(sorted(held))} weights"] if held else []
        if self._casts:
            parts.append(f"torch.autocast in {self._casts}")
        if self.has_scaler:
            parts.append("GradScaler")
        return " with ".join(parts)

    def is_by_apex(self) -> bool:
        """Return whether the script trains through Apex, which is recorded there."""
        return self._initialized() or self._by_optimizer

    def use(self) -> None:
        """Do nothing: the arm has no effect."""
