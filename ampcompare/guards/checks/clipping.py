"""Guards of what happens between backward pass and step: clipping of scaled gradients, autocast left on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.base.location import Location, is_called_by_lightning, user_location
from ampcompare.guards.detection.detector import Detector, guard_of_name
from ampcompare.guards.detection.reporting import ViolationSink
from ampcompare.guards.detection.script_state import (
    ScriptState,
    contains_parameter,
    first_loss,
    first_parameter_with_gradient,
    parameters_of_optimizer,
    storage_id_of,
)

if TYPE_CHECKING:
    from torch import Tensor


class BackwardInAutocast(Detector):
    """A backward pass that is not part of another, with autocast on for the device of its loss.

    Silent in a step that a trainer of Lightning calls inside of its own block, which the script cannot leave.
    """

    guard = guard_of_name("backward-in-autocast")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        loss = first_loss(losses)
        if loss is not None and _is_autocast_on(loss.device.type) and not is_called_by_lightning():
            self.report("backward() runs inside the autocast block")


def _is_autocast_on(device: str) -> bool:
    import torch

    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that autocast does not know
        return False


IN_APEX = (
    "with Apex clip `amp.master_params(optimizer)` after the `scale_loss` block, not "
    "`model.parameters()` inside it"
)
OWN_CLIP = "gradients are limited by clamp before scaler.unscale_(optimizer)"
BEHIND_HOOKS = (
    "limit them behind `scaler.unscale_(optimizer)`, as by `clip_grad_value_`, instead of in a hook; with Apex those "
    "of `amp.master_params(optimizer)` after the `scale_loss` block; or multiply the limit by `scaler.get_scale()`"
)
ACCUMULATING = "clip after the last `scale_loss` block of an update, the one without `delay_unscale`"


class ClipScaled(Detector):
    """Clipping of gradients that a GradScaler or a `scale_loss` block has scaled, or of O2's half copies.

    Silent if a backward pass since the last update did not use the scaler, because it is then unknown whose gradients
    these are, and if `get_scale()` was called in between: the limit may have been scaled too. A function of the
    script's own clips where it limits gradients by `clamp`: in place, with a result that is the gradient when the
    scaler steps, in a hook, or in the backward of a function of its own.
    """

    guard = guard_of_name("clip-scaled")

    def __init__(self, facts: ScriptState, sink: ViolationSink) -> None:
        super().__init__(facts, sink)
        self._owners: dict[int, Any] = {}  # storage of a gradient -> optimizer, as of the pass `_owners_of`
        self._owners_of = -1
        # storage of a result of clamp -> its line, since the last step
        self._limited: dict[int, Location] = {}

    def at_clipping(self, parameters: Sequence[Tensor]) -> None:
        import torch

        parameter = first_parameter_with_gradient(parameters)
        if parameter is None:
            return
        facts = self.facts
        if facts.is_inside_scale_loss_block():
            self.report(
                "gradients are clipped inside the scale_loss block, before it unscales them", remedy=IN_APEX
            )
        elif facts.holds_scaled_gradients():
            if not any(
                contains_parameter(parameters_of_optimizer(optimizer), parameter)
                for optimizer in facts.unscaled
            ):
                self.report("gradients are clipped before scaler.unscale_(optimizer)")
        for optimizer in list(facts.prepared):
            stash = optimizer._amp_stash
            half = getattr(stash, "all_fp16_params", ())
            masters = getattr(stash, "all_fp32_from_fp16_params", ())
            if masters and parameter.dtype is torch.float16 and contains_parameter(half, parameter):
                self.report(
                    "the fp16 gradients of O2 are clipped, which the optimizer does not use", remedy=IN_APEX
                )
            elif stash.params_have_scaled_gradients and contains_parameter(
                parameters_of_optimizer(optimizer), parameter
            ):
                self.report(
                    "gradients are clipped that scale_loss(..., delay_unscale=True) has left scaled",
                    remedy=ACCUMULATING,
                )

    def after_clamp(self, tensor: Tensor, result: Tensor) -> None:
        if self.facts.is_in_backward and self.facts.hooks.is_gradient(tensor):
            self.report(
                "gradients are limited within the backward pass, which has them scaled", remedy=BEHIND_HOOKS
            )
            return
        optimizer = self._optimizer_of_gradient(tensor)
        if optimizer is None or optimizer in self.facts.unscaled:
            return
        if storage_id_of(result) != storage_id_of(tensor):
            self._limited[storage_id_of(result)] = user_location()
        elif self.facts.is_inside_scale_loss_block():
            self.report("gradients are limited by clamp inside the scale_loss block", remedy=IN_APEX)
        else:
            self.report(OWN_CLIP)

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        if scaler is not None and optimizer not in self.facts.unscaled:
            for parameter in parameters_of_optimizer(optimizer) if self._limited else ():
                location = (
                    None if parameter.grad is None else self._limited.get(storage_id_of(parameter.grad))
                )
                if location is not None:
                    self.report(OWN_CLIP, location)
        self._limited.clear()

    def _optimizer_of_gradient(self, gradient: Tensor) -> Any:
        """Return the optimizer that a tensor is a gradient of, by its storage; None for another tensor."""
        if self._owners_of != self.facts.backwards:
            self._owners_of = self.facts.backwards
            self._owners = {
                storage_id_of(parameter.grad): optimizer
                for optimizer in self.facts.optimizers
                for parameter in parameters_of_optimizer(optimizer)
                if parameter.grad is not None
            }
        return self._owners.get(storage_id_of(gradient))
