"""Stand behind `torch.autocast` and `GradScaler` of a script, so that they do what the arm does.

The script keeps its own blocks: where it switches autocast off, it stays off. A GradScaler keeps the settings that the
script passes, except those that the arm names.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.backends.arm import Arm
from ampcompare.errors import ScalingError, UnsupportedCombination
from ampcompare.guards.patches import Patches
from ampcompare.script.session import here

__all__ = ["TorchAmp"]

LINES = (
    "`model, optimizer = amp.initialize(model, optimizer)` and `with amp.scale_loss(loss, optimizer) as scaled: "
    "scaled.backward()`, with `from apex import amp`"
)


class TorchAmp:
    """The names of `torch.amp` under an arm in fp32 or of `torch.amp`.

    Attributes:
        used: the script has entered an autocast block, or made a GradScaler.

    Args:
        arm: of the backend fp32 or native; any other is refused when the script first uses `torch.amp`.
    """

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._dtype: torch.dtype | None = None
        if arm.backend == "native":
            self._dtype = getattr(torch, arm.options["dtype"])
        self.used = False
        self._scales = False

    def install(self, patches: Patches) -> None:
        """Replace the constructors of both classes."""
        patches.wrap(autocast_mode.autocast, "__init__", self._make_autocast)
        patches.wrap(torch.amp.GradScaler, "__init__", self._make_scaler)
        patches.wrap(torch.amp.GradScaler, "scale", self._scale)
        # One for all optimizers: torch wraps the `step` of each class around it.
        register_optimizer_step_pre_hook(self._before_step)

    def _use(self) -> None:
        if not self.used:
            if self._arm.backend not in ("fp32", "native"):
                raise UnsupportedCombination(
                    here(
                        f"the script uses torch.amp, which names no model, so {self._arm} cannot prepare one; arms for "
                        "it are fp32, native:fp16, native:bf16 and apex:O1. For the others put these two lines into "
                        f"it instead: {LINES}"
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
        if enabled and not _is_own():
            self._use()
            dtype, enabled = self._dtype, self._dtype is not None
        original(block, device_type, dtype, enabled, cache_enabled)

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_own():
            self._use()
            names = ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
            kwargs.update(zip(names, args, strict=False))
            kwargs.update({name: self._arm.options[name] for name in names if name in self._arm.options})
            args, kwargs["enabled"] = (), self._dtype is torch.float16
        original(scaler, *args, **kwargs)

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._scales = True
        return original(scaler, outputs)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        if self.used and not self._scales and self._dtype is torch.float16:
            raise ScalingError(
                here(
                    f"the script uses autocast without a GradScaler, and {self._arm} needs a scaled loss: add "
                    "`scaler = torch.amp.GradScaler()` and scale, step and update by it, or compare native:bf16"
                )
            )


def _is_own() -> bool:
    """Return whether a precision, not the script, calls the constructor that calls this."""
    name: str = sys._getframe(3).f_globals.get("__name__", "")  # above: the replacement, and the function here
    return name.startswith("ampcompare.precision.")
