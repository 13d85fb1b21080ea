"""What the backends that delegate training to another library share: its gradient scaler."""

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.tensors.cuda_casts import cast_as_on_cuda
from ampcompare.training.precision.base import (
    FixedOutcome,
    LateStepOutcomes,
    StepOutcome,
    UnscaleOnce,
    applied_outcome,
    half_dtype_of,
)


class LibraryPrecision(UnscaleOnce):
    """A library casts and steps each optimizer; if it scales losses, it uses one `GradScaler` of torch.

    A model that the library has prepared casts in its own forward pass; `autocast` says by which lists on a CPU.
    """

    key = "scaler"

    def __init__(
        self, arm: str, packages: Mapping[str, str], scaler: torch.amp.GradScaler | None = None
    ) -> None:
        super().__init__()
        self.half_dtype = half_dtype_of(Arm.parse(arm))
        self.packages = dict(packages)
        self._follow_loss_scaler(scaler)

    def _follow_loss_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self._scale = 0.0 if scaler is None else scaler.get_scale()
        self._outcomes = LateStepOutcomes()

    def autocast(self) -> AbstractContextManager[None]:
        return cast_as_on_cuda(self.device_type, self.autocast_lists)

    def _refuse_several_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise if several optimizers would share a backward pass and the library's scaler."""
        if len(optimizers) > 1 and self.scaler is not None:
            raise UnsupportedCombination(
                f"{next(iter(self.packages))} updates the loss scale after each optimizer's step, so the second of "
                f"{len(optimizers)} optimizers would be unscaled with a different scale than its gradients were "
                "scaled with; use one optimizer, or native:fp16"
            )

    @abc.abstractmethod
    def _let_library_unscale(self, optimizer: Optimizer) -> None:
        """Let the library divide the gradients by its scale."""

    def _let_library_step(self, optimizer: Optimizer) -> None:
        """Let the library step, or skip, and update its scale."""
        optimizer.step()

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss if self.scaler is None else self.scaler.scale(loss))

    def _unscale(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self._let_library_unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            self._let_library_step(optimizer)
        self._note_optimizers_were_stepped(optimizers)
        if self.scaler is None:
            return applied_outcome(len(optimizers))
        scale = self.scaler._scale
        if scale is None:  # a scaler that is disabled, or has scaled nothing yet
            return FixedOutcome((True,), (self._scale,))
        # A copy does not wait; `get_scale` would wait for the step, which the library itself does not.
        return self._outcomes.outcome_of_step([scale.clone()], self._outcome_from_scale)

    def _outcome_from_scale(self, values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
        # Not every library reports whether it stepped; the scale falls at an overflow and only then, until it is 0.
        before, self._scale = self._scale, values[0]
        return (self._scale >= before > 0,), (self._scale,)

    def loss_scales(self) -> tuple[float, ...]:
        return () if self.scaler is None else (self.scaler.get_scale(),)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))
            self._follow_loss_scaler(self.scaler)
