"""Keep a dynamic loss scale on the device, so that no step waits for the host to read the overflow flag."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["DeviceScale", "is_exact_on_device"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LARGEST = 2.0**127
_SMALLEST = 2.0**-126
_SEVERAL = -1  # windows since the host last knew the scale: doublings cannot be bounded by a division


class DeviceScale:
    """Loss scale, its inverse and the growth counter as scalars of one device.

    Attributes:
        scale: fp32, what the loss is multiplied by; a new tensor after every update, so that anyone may keep it.
        inverse: fp32, what gradients are multiplied by; at most the largest float.
        tracker: int32, clean updates in a row.
    """

    __slots__ = ("_clear", "_loaded", "_steps", "_window", "device", "inverse", "scale", "tracker")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.inverse = torch.ones((), dtype=torch.float32, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._clear = torch.zeros((), dtype=torch.float32, device=device)
        # What the host knows of the scale without asking: where it started, and how often it can have doubled since.
        self._loaded, self._steps = 1.0, 0
        self._window: int | None = None

    def new_flag(self) -> Tensor:
        """Return an overflow flag that is not set: fp32, to be read or kept by anyone after the pass."""
        return self._clear.clone()

    def load(self, scale: float, unskipped: int) -> None:
        """Take over the values that the host holds; does not wait for the device."""
        self.scale = torch.full((), scale, dtype=torch.float32, device=self.device)
        self.tracker.fill_(unskipped)
        self._loaded, self._steps, self._window = scale, unskipped, None
        self._invert()

    def update(self, flag: Tensor, window: int, least: float | None, most: float) -> None:
        """Halve the scale if `flag` is set, else count, and double it after `window` clean updates in a row."""
        scale = self.scale.clone()
        torch._amp_update_scale_(scale, self.tracker, flag, 2.0, 0.5, window)
        if least or self._may_exceed(most, window):
            scale.clamp_(min=least or None, max=most)
        self.scale = scale
        self._invert()

    def _may_exceed(self, most: float, window: int) -> bool:
        """Count an update, and tell whether the scale can be above `most`: each look at that costs a kernel."""
        self._steps += 1
        if self._window is None:
            self._window = window
        elif self._window != window:
            self._window = _SEVERAL
        doublings = min(self._steps // max(window, 1), 256)
        return self._window == _SEVERAL or math.ldexp(self._loaded, doublings) > most

    def _invert(self) -> None:
        self.inverse = self.scale.reciprocal().clamp_(max=_FLOAT32_MAX)

    def read(self) -> tuple[float, int]:
        """Return the scale and the counter; waits for the device."""
        return self.scale.item(), int(self.tracker.item())


def is_exact_on_device(scale: float, least: float | None, most: float | None) -> bool:
    """Tell whether fp32 scalars of a device follow the host's arithmetic bit for bit.

    Powers of two have exact inverses, and bounds that hold at the start need not be told apart later: the floor is for
    halving only, and the ceiling for doubling only.
    """
    if not _is_power_of_two(scale) or not _is_power_of_two(most) or scale > most:  # type: ignore[operator]
        return False
    return not least or (_is_power_of_two(least) and least <= scale)


def _is_power_of_two(value: float | None) -> bool:
    return isinstance(value, (int, float)) and _SMALLEST <= value <= _LARGEST and math.frexp(value)[0] == 0.5
