"""Guards of a precision that is asked for and not in force: autocast and scalers that do nothing, or do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampcompare.guards.detection.detector import Detector, guard_of_name
from ampcompare.guards.detection.script_state import EnteredAutocast, first_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COMPARED = 64  # elements of a weight
MAX_COMPARISONS = 128  # each of which waits for the device


class AutocastElsewhere(Detector):
    """A forward pass in autocast for other devices only than that of its loss, or for one that torch does not see."""

    guard = guard_of_name("autocast-elsewhere")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        loss = first_loss(losses)
        entered = self.facts.autocasts
        if loss is None or not entered or any(_was_autocast_on(one, loss) for one in entered):
            return
        last = entered[-1]
        self.report(
            f'autocast("{last.device}") casts nothing: the loss is on {loss.device.type}', last.location
        )


class ScalerOffForMissingDevice(Detector):
    """A GradScaler that was not asked to be off, and is, while the script trains."""

    guard = guard_of_name("scaler-off")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        for device, location in self.facts.scalers_off:
            self.report(f'GradScaler("{device}") scales nothing: torch sees no such device', location)
        self.facts.scalers_off.clear()


class AcceleratorOffOnCpu(Detector):
    """An Accelerator that was asked for fp16 on a CPU, while the script trains without an autocast that it enters
    itself."""

    guard = guard_of_name("accelerator-off")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        loss = first_loss(losses)
        if loss is None or any(_was_autocast_on(one, loss) for one in self.facts.autocasts):
            return
        for device, location in self.facts.accelerators_off:
            self.report(
                f'Accelerator(mixed_precision="fp16") trains in fp32: it has no fp16 on a {device}', location
            )
        self.facts.accelerators_off.clear()


class ScalerWithBf16(Detector):
    """A scaled loss of a forward pass in autocast whose dtype is given as bfloat16, each time that it was entered."""

    guard = guard_of_name("scaler-with-bf16")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        import torch

        loss = first_loss(losses)
        if loss is None or self.facts.blocks or not self.facts.is_scaled_loss(loss):
            return
        entered = [one for one in self.facts.autocasts if _was_autocast_on(one, loss)]
        if entered and all(one.is_dtype_given and one.dtype is torch.bfloat16 for one in entered):
            self.report("a GradScaler scales the loss of autocast in bfloat16", entered[-1].location)


class UnscaledLossOfDefaultFp16(Detector):
    """A loss from autocast in fp16 that no dtype has asked for, and that nothing has scaled.

    Silent if the loss ends in a product, which may be a scale of the script's own.
    """

    guard = guard_of_name("autocast-without-dtype")

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        import torch

        loss = first_loss(losses)
        if loss is None or grad_outputs is not None or self.facts.blocks or self.facts.is_scaled_loss(loss):
            return
        if loss.grad_fn is None or loss.grad_fn.name().startswith("Mul"):
            return
        entered = [one for one in self.facts.autocasts if _was_autocast_on(one, loss)]
        if entered and all(not one.is_dtype_given and one.dtype is torch.float16 for one in entered):
            device = loss.device.type
            self.report(
                f'autocast("{device}") uses fp16 by default, and no loss is scaled', entered[-1].location
            )


def _was_autocast_on(entered: EnteredAutocast, loss: Tensor) -> bool:
    return loss.device.type in entered.on_for


class StaleCast(Detector):
    """A layer whose weight has changed since autocast has cast it, in a block that keeps the cast.

    Some elements of each weight are compared as they are cast, since a write by `data` has no version.
    """

    guard = guard_of_name("stale-cast")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # weights with some elements of their cast, by id
        self._comparisons = 0

    def at_weight_cast_by_autocast(self, weight: Tensor, dtype: torch.dtype) -> None:
        import torch

        if self._comparisons >= MAX_COMPARISONS or (
            weight.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return
        # bits: NaN differs from itself
        cast = weight.detach().reshape(-1)[:COMPARED].to(dtype).view(torch.int16)
        known = self._casts.setdefault(id(weight), (weight, cast))
        if known[1] is cast:
            return
        self._comparisons += 1
        if not torch.equal(known[1], cast):
            self.report(
                "this uses the old cast of weights that were written since an open autocast block has cast them"
            )

    def after_autocast_cache_cleared(self) -> None:
        self._casts.clear()
