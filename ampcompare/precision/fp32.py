"""Plain single precision: nothing is cast and nothing is scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, StepOutcome, all_applied, owned_params, refuse_wrapped

__all__ = ["FP32"]


class FP32(Precision):
    """The reference that the other backends are compared with."""

    key = "precision"
    half_dtype = None

    def __init__(self, *, device: str = "cpu") -> None:
        self._null: AbstractContextManager[None] = nullcontext()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
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
