"""Guards of what happens between backward pass and step: clipping of scaled gradients, autocast left on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.guards.detector import Detector, guard_of
from ampcompare.guards.script_state import contains, first_loss, first_with_gradient, parameters_of

if TYPE_CHECKING:
    from torch import Tensor


class BackwardInAutocast(Detector):
    """A backward pass that is not part of another, with autocast on for the device of its loss."""

    guard = guard_of("backward-in-autocast")

    def backward(self, losses: Any, grad_outputs: Any) -> None:
        loss = first_loss(losses)
        if loss is not None and _autocasts(loss.device.type):
            self.report("backward() runs inside the autocast block")


def _autocasts(device: str) -> bool:
    import torch

    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that autocast does not know
        return False


IN_APEX = (
    "with Apex clip `amp.master_params(optimizer)` after the `scale_loss` block, not `model.parameters()` inside it"
)
ACCUMULATING = "clip after the last `scale_loss` block of an update, the one without `delay_unscale`"


class ClipScaled(Detector):
    """Clipping of gradients that a GradScaler or a `scale_loss` block has scaled, or of O2's half copies.

    Silent if a backward pass since the last update did not use the scaler, because it is then unknown whose gradients
    these are, and if `get_scale()` was called in between: the limit may have been scaled too.
    """

    guard = guard_of("clip-scaled")

    def clip(self, parameters: Sequence[Tensor]) -> None:
        import torch

        parameter = first_with_gradient(parameters)
        if parameter is None:
            return
        facts = self.facts
        if any(block.scaled and block.backwards for block in facts.blocks):
            self.report("gradients are clipped inside the scale_loss block, before it unscales them", remedy=IN_APEX)
        elif 0 < facts.window_backwards <= facts.scale_calls and not facts.scale_read:
            if not any(contains(parameters_of(optimizer), parameter) for optimizer in facts.unscaled):
                self.report("gradients are clipped before scaler.unscale_(optimizer)")
        for optimizer in list(facts.prepared):
            stash = optimizer._amp_stash
            half = getattr(stash, "all_fp16_params", ())
            masters = getattr(stash, "all_fp32_from_fp16_params", ())
            if masters and parameter.dtype is torch.float16 and contains(half, parameter):
                self.report("the fp16 gradients of O2 are clipped, which the optimizer does not use", remedy=IN_APEX)
            elif stash.params_have_scaled_gradients and contains(parameters_of(optimizer), parameter):
                self.report(
                    "gradients are clipped that scale_loss(..., delay_unscale=True) has left scaled",
                    remedy=ACCUMULATING,
                )
