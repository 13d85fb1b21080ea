"""Keep a dynamic loss scale on the device, so that no step waits for the host to read the overflow flag."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .host_scalars import FLOAT32_MAX

__all__ = ["DeviceScale", "is_exact_on_device"]

_MAX_EXACT = 2.0**127
_MIN_EXACT = 2.0**-126
_SEVERAL_WINDOWS = -1  # several windows since the last `load`: doublings cannot be bounded by a division


class DeviceScale:
    """Loss scale, its inverse and the growth counter as scalars of one device.

    Each keeps its storage and is updated in place, so that a CUDA graph that recorded an update can repeat it.

    Attributes:
        scale: fp32, what the loss is multiplied by; `copy` gives one that does not change.
        inverse: fp32, what gradients are multiplied by; at most the largest float.
        tracker: int32, clean updates in a row.
        repeated: updates are recorded and repeated, so each applies all bounds, even those out of reach so far.
    """

    __slots__ = (
        "_clear",
        "_flag",
        "_halvings",
        "_loaded",
        "_steps",
        "_window",
        "device",
        "inverse",
        "repeated",
        "scale",
        "tracker",
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.inverse = torch.ones((), dtype=torch.float32, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.repeated = False
        self._clear = torch.zeros((), dtype=torch.float32, device=device)
        self._flag: Tensor | None = None
        # What the host knows without a read: the initial scale, and how often it can have moved since.
        self._loaded, self._steps, self._halvings = 1.0, 0, 0
        self._window: int | None = None

    def new_flag(self) -> Tensor:
        """Return an overflow flag that is not set: a separate fp32 scalar, valid after the pass."""
        flag, self._flag = self._flag, None
        return self._clear.clone() if flag is None else flag

    def initial_grad(self) -> Tensor:
        """Return a copy of the scale to start a backward pass from; one kernel makes it and the flag of the pass.

        A copy, because autograd may use it as the gradient of a parameter, which is then unscaled in place.
        """
        initial_grad, self._flag = torch.empty_like(self.scale), torch.empty_like(self._clear)
        torch._foreach_copy_([initial_grad, self._flag], [self.scale, self._clear])
        return initial_grad

    def copy(self) -> Tensor:
        """Return the scale as it is now, in a tensor that will not change."""
        return self.scale.clone()

    def load(self, scale: float, unskipped: int) -> None:
        """Set the host's values; does not wait for the device."""
        self.scale.fill_(scale)
        self.tracker.fill_(unskipped)
        self._loaded, self._steps, self._halvings, self._window = scale, unskipped, 0, None
        self._invert()

    def update(self, flag: Tensor, window: int, min_scale: float | None, max_scale: float) -> None:
        """Halve the scale if `flag` is set, else count, and double it after `window` clean updates in a row."""
        torch._amp_update_scale_(self.scale, self.tracker, flag, 2.0, 0.5, window)
        self._count(window)
        if min_scale or self.repeated or self._may_exceed(max_scale, window):
            self.scale.clamp_(min=min_scale or None, max=max_scale)
        self._invert()

    def _count(self, window: int) -> None:
        self._steps += 1
        self._halvings += 1
        if self._window is None:
            self._window = window
        elif self._window != window:
            self._window = _SEVERAL_WINDOWS

    def _may_exceed(self, max_scale: float, window: int) -> bool:
        """Return whether the scale can be above `max_scale`: the clamp costs a kernel."""
        doublings = min(self._steps // max(window, 1), 256)
        return self._window == _SEVERAL_WINDOWS or math.ldexp(self._loaded, doublings) > max_scale

    def _may_vanish(self) -> bool:
        """Return whether the scale can be so small that its inverse is infinite."""
        return math.ldexp(self._loaded, -min(self._halvings, 512)) < 1 / _MAX_EXACT

    def _invert(self) -> None:
        torch.reciprocal(self.scale, out=self.inverse)
        if self.repeated or self._may_vanish():
            self.inverse.clamp_(max=FLOAT32_MAX)

    def read(self) -> tuple[float, int]:
        """Return the scale and the counter; waits for the device."""
        return self.scale.item(), int(self.tracker.item())


def is_exact_on_device(scale: float, min_scale: float | None, max_scale: float | None) -> bool:
    """Return whether fp32 scalars of a device follow the host's arithmetic bit for bit.

    Powers of two have exact inverses, and bounds that hold at the start need no separate check later: the floor is for
    halving only, and the ceiling for doubling only.
    """
    if not _is_power_of_two(scale) or not _is_power_of_two(max_scale) or scale > max_scale:  # type: ignore[operator]
        return False
    return not min_scale or (_is_power_of_two(min_scale) and min_scale <= scale)


def _is_power_of_two(value: float | None) -> bool:
    return isinstance(value, (int, float)) and _MIN_EXACT <= value <= _MAX_EXACT and math.frexp(value)[0] == 0.5
