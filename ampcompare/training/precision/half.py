"""Manual `.half()`: 16-bit weights, gradients and optimizer state, as scripts without any amp do it.

Plain `half` has no master weights and no overflow check: small updates round to nothing, and infinities reach the
weights. This arm shows the consequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.lists import by_type
from ampcompare.training.precision.base import Precision, StepOutcome, all_applied, owned_params
from ampcompare.training.precision.half_cast import cast_model, cast_state
from ampcompare.training.precision.half_optimizer import HalfOptimizer
from ampcompare.training.precision.keep_fp32 import kept_in_fp32
from ampcompare.training.precision.library_precision import UnscaleOnce

__all__ = ["Half", "make_half"]

PLAIN = {"dtype", "bn_fp32", "keep_fp32"}


class Half(UnscaleOnce):
    """The whole model in one 16-bit type; inputs are cast to it, and outputs to fp32.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
        loss_scale: static factor on the loss, divided out of the gradients once per step; None for none.
        keep_fp32: patterns of modules that stay in fp32, as for `kept_in_fp32`.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str = "float16",
        bn_fp32: bool = False,
        loss_scale: float | None = None,
        keep_fp32: str = "",
    ) -> None:
        super().__init__()
        self.keep_fp32 = keep_fp32
        self.half_dtype: torch.dtype = getattr(torch, dtype)
        self.bn_fp32 = bn_fp32
        self.loss_scale = loss_scale
        self._scales: tuple[float, ...] = () if loss_scale is None else (loss_scale,)

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        with kept_in_fp32(models, self.keep_fp32, self.half_dtype) as self.kept_fp32:
            for model in models:
                cast_model(model, self.half_dtype, bn_fp32=self.bn_fp32)
        for optimizer in optimizers:
            cast_state(optimizer)
        return list(models), list(optimizers)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss if self.loss_scale is None else loss * self.loss_scale)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale).backward()

    def _unscale(self, optimizer: Optimizer) -> None:
        if self.loss_scale is not None:
            for grads in by_type(param.grad for param in owned_params(optimizer) if param.grad is not None):
                torch._foreach_div_(grads, self.loss_scale)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if self.loss_scale is not None:
            for optimizer in optimizers:
                self.unscale(optimizer)
        for optimizer in optimizers:
            self.end_update(optimizer, good=True)
        self._outcome = all_applied(len(optimizers), self._scales)
        return self._outcome

    def end_update(self, optimizer: Optimizer, *, good: bool) -> Any:
        """Step an optimizer whose gradients are unscaled, or leave it as it is. Return what its step does."""
        if self.loss_scale is not None:
            self._forget([optimizer])
        return optimizer.step() if good else None

    def unrecordable(self, optimizers: Sequence[Optimizer]) -> None:
        return None

    def loss_scales(self) -> tuple[float, ...]:
        return self._scales

    def state_dict(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loss_scale" in state:
            self.loss_scale = float(state["loss_scale"])
            self._scales = (self.loss_scale,)


def make_half(*, device: str = "cpu", loss_scale: float | str | None = None, **options: Any) -> Precision:
    """Build the backend of a `half` arm: plain, or with what an optimizer of 16-bit weights adds.

    Args:
        options: those of `Half`, or of `HalfOptimizer`.
    """
    master_weights = bool(options.pop("master_weights", False))
    if master_weights or isinstance(loss_scale, str) or not options.keys() <= PLAIN:
        return HalfOptimizer(master_weights=master_weights, loss_scale=loss_scale, **options)
    return Half(device=device, loss_scale=loss_scale, **options)
