"""A dynamic loss scale that the device moves by itself, so that no step waits for the host to read an overflow flag."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["DeviceLossScale", "is_exact_on_device"]

FACTOR = 2.0
_MIN_EXACT, _MAX_EXACT = 2.0**-126, 2.0**127


def is_exact_on_device(scale: float) -> bool:
    """Return whether fp32 holds the scale and its inverse exactly, as Python does."""
    return _MIN_EXACT <= scale <= _MAX_EXACT and math.frexp(scale)[0] == 0.5


class DeviceLossScale:
    """Scale, its inverse, and the count of good steps in a row, as scalars of one device.

    Args:
        scale: a power of two.
        good_steps: good steps in a row so far.
        growth_interval: so many of them double the scale.
        min_scale: an overflow halves the scale, down to this.
    """

    def __init__(
        self, device: torch.device, scale: float, good_steps: int, *, growth_interval: int, min_scale: float
    ) -> None:
        self._scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._good_steps = torch.full((), good_steps, dtype=torch.int32, device=device)
        self._growth_interval = growth_interval
        self._min_scale = min_scale
        self.inverse = self._scale.reciprocal()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, computed in fp32 and rounded to the dtype of the loss, as by a number."""
        return loss * self._scale if loss.dtype is torch.float32 else (loss.float() * self._scale).to(loss.dtype)

    def move(self, overflow: Tensor) -> Tensor:
        """Move the scale after a step whose `overflow`, an fp32 scalar, is not 0 if it had one; return a copy."""
        torch._amp_update_scale_(self._scale, self._good_steps, overflow, FACTOR, 1 / FACTOR, self._growth_interval)
        self._scale.clamp_(min=self._min_scale)
        torch.reciprocal(self._scale, out=self.inverse)
        return self._scale.clone()

    def read(self) -> tuple[float, int]:
        """Return scale and count; waits for the device."""
        return self._scale.item(), int(self._good_steps.item())
