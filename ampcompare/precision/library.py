"""What the backends that hand training to another library share: its gradient scaler, and what really ran."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.adapters import twin_of
from ampcompare.errors import UnsupportedCombination
from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome, all_applied, owned_params
from ampcompare.record import Effective

__all__ = ["ByLibrary"]

HALF_DTYPES = {
    "fp32": None,
    "native:fp16": torch.float16,
    "native:bf16": torch.bfloat16,
    "half": torch.float16,
    "half:dtype=bf16": torch.bfloat16,
}


class ByLibrary(Precision):
    """A library casts, and steps each optimizer; where it scales losses, it does so by one `GradScaler` of torch.

    Args:
        backend: the name of the arm's backend.
        asked: the value of the arm's option.
        found: our arm of the precision that the library has set itself to.
        library, version: of what is installed.
        scaler: the library's; None where it scales nothing, or has not made it yet.
    """

    key = "scaler"

    def __init__(
        self,
        backend: str,
        asked: str,
        found: str,
        *,
        library: str,
        version: str,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        as_asked = found == twin_of(backend, asked)
        reason = "" if as_asked else f"{library} took {found} for {asked} on this device"
        self.effective = Effective(arm=found, library=library, version=version, as_asked=as_asked, reason=reason)
        self.half_dtype = HALF_DTYPES[found]
        self._null: AbstractContextManager[None] = nullcontext()
        self._unscaled: set[int] = set()
        self._use(scaler)

    def _use(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self._scale = 0.0 if scaler is None else scaler.get_scale()

    def _refuse_several(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise where several optimizers would share a backward pass and the library's scaler.

        Raises:
            UnsupportedCombination: an update of the scale between two steps unscales the second by the wrong scale.
        """
        if len(optimizers) > 1 and self.half_dtype is not None:
            assert self.effective is not None
            raise UnsupportedCombination(
                f"{self.effective.library} moves the loss scale after each optimizer's step, so that the second of "
                f"{len(optimizers)} would be unscaled by another scale than its gradients have; use one optimizer, or "
                "native:fp16"
            )

    @abc.abstractmethod
    def _unscale_once(self, optimizer: Optimizer) -> None:
        """Have the library divide the gradients by its scale."""

    @abc.abstractmethod
    def _step(self, optimizer: Optimizer) -> None:
        """Have the library step, or skip, and move its scale."""

    def autocast(self) -> AbstractContextManager[None]:
        return self._null  # a model that the library has prepared casts in its own forward

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss if self.scaler is None else self.scaler.scale(loss))

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self._unscale_once(optimizer)
            self._unscaled.add(id(optimizer))
        return owned_params(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            self._step(optimizer)
        if self.scaler is None:
            return all_applied(len(optimizers))
        self._unscaled.clear()
        # Not every library says whether it stepped; a scale falls at an overflow and at nothing else, until it is 0.
        before, self._scale = self._scale, self.scaler.get_scale()
        return FixedOutcome((self._scale >= before > 0,), (self._scale,))

    def loss_scales(self) -> tuple[float, ...]:
        return () if self.scaler is None else (self.scaler.get_scale(),)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))
            self._use(self.scaler)
