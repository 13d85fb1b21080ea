"""The loss scalers that came before `apex.amp`: one static, one dynamic, both checked parameter by parameter.

Source: Apex 25.05, `apex.fp16_utils.loss_scaler`.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ampcompare.apex import deprecated_warning
from ampcompare.apex.fp16_utils.fp16util import to_python_float as to_python_float


class LossScaler:
    """Scale losses by a constant; overflow is never detected."""

    def __init__(self, scale: float = 1) -> None:
        deprecated_warning("fp16_utils.LossScaler is deprecated in Apex; use torch.amp.GradScaler")
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False, whatever the gradients."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Keep the scale."""

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: tuple[Tensor, ...]) -> Any:
        """Return the input gradients times the scale; has the form of a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Back-propagate `loss` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Scale losses as far as gradients allow: lower on overflow, raise after `scale_window` iterations without.

    The scale starts at 2**32 and never falls below 1.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether the fp32 sum of any gradient is inf or NaN (large finite gradients can trip it too)."""
        return any(param.grad is not None and self._has_inf_or_nan(param.grad.data) for param in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not math.isfinite(float(x.float().sum()))

    def update_scale(self, overflow: bool) -> None:
        """Count an iteration and move the scale."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
