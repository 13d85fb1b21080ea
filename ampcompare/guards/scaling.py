"""Guards of what happens between backward pass and step: clipping of scaled gradients, autocast left on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.guards.detector import Detector
from ampcompare.guards.facts import first_with_gradient, holds, parameters_of

__all__ = ["BackwardInAutocast", "ClipScaled"]


class BackwardInAutocast(Detector):
    """A backward pass that is not part of another, with autocast on for the device of its loss."""

    name = "backward-in-autocast"

    def backward(self, losses: Any, seeds: Any) -> None:
        loss = losses if isinstance(losses, Tensor) else next(iter(losses), None)
        if isinstance(loss, Tensor) and _autocasts(loss.device.type):
            self.report("backward() runs inside the autocast block")


def _autocasts(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that autocast does not know
        return False


class ClipScaled(Detector):
    """Clipping of gradients that a GradScaler or a `scale_loss` block has scaled, or of O2's half copies.

    Silent where a backward pass went round the scaler since its last update, as whose gradients these are is not known
    then, and where `get_scale()` was read in between: the limit may have been scaled too.
    """

    name = "clip-scaled"

    def clip(self, parameters: Sequence[Tensor]) -> None:
        parameter = first_with_gradient(parameters)
        if parameter is None:
            return
        facts = self.facts
        if any(block.scaled and block.backwards for block in facts.blocks):
            self.report("gradients are clipped inside the scale_loss block, before it unscales them")
        elif 0 < facts.window_backwards <= facts.scale_calls and not facts.scale_read:
            if not any(holds(parameters_of(optimizer), parameter) for optimizer in facts.unscaled):
                self.report("gradients are clipped before scaler.unscale_(optimizer)")
        for optimizer in list(facts.prepared):
            stash = optimizer._amp_stash
            half = getattr(stash, "all_fp16_params", ())
            masters = getattr(stash, "all_fp32_from_fp16_params", ())
            if masters and parameter.dtype is torch.float16 and holds(half, parameter):
                self.report("the half gradients of O2 are clipped, which the optimizer does not use")
            elif stash.params_have_scaled_gradients and holds(parameters_of(optimizer), parameter):
                self.report("gradients are clipped that scale_loss(..., delay_unscale=True) has left scaled")
