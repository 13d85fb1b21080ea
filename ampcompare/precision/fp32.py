"""Plain single precision: nothing is cast and nothing is scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, StepOutcome, all_applied, owned_params, refuse_wrapped
from ampcompare.precision.tf32 import require_tf32, set_tf32

__all__ = ["FP32"]


class FP32(Precision):
    """The reference that the other backends are compared with.

    Args:
        tf32: compute products and convolutions in TF32, from `prepare` on and in the whole process; else torch's
            switches stay as they are.

    Raises:
        BackendUnavailable: TF32 on a device without it.
    """

    key = "precision"
    half_dtype = None

    def __init__(self, *, device: str = "cpu", tf32: bool = False) -> None:
        if tf32:
            require_tf32(torch.device(device), "fp32:tf32")
        self.tf32 = tf32
        self._null: AbstractContextManager[None] = nullcontext()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        if self.tf32:
            set_tf32(True)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return self._null

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss)

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return owned_params(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            optimizer.step()
        return all_applied(len(optimizers))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
