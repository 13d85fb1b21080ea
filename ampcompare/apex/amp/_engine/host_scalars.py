"""Keep what kernels need of a loss scale that the host holds: its inverse, the initial gradient, overflow flags."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompare.tensors.loss_scale import FLOAT32_MAX

__all__ = ["HostScalars"]


class HostScalars:
    """fp32 scalars, one set for each device that gradients live on, made on first use and reused."""

    __slots__ = ("_flags", "_flags_written", "_initial_grads", "_inverses")

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._flags_written = False
        self._inverses: dict[torch.device, tuple[float, Tensor]] = {}
        self._initial_grads: dict[torch.device, tuple[float, Tensor]] = {}

    def inverse(self, device: torch.device, scale: float, *, strict: bool) -> Tensor:
        """Return `1 / scale`, at most the largest float.

        Raises:
            ZeroDivisionError: a scale of 0 in strict mode, as in Apex.
        """
        cached = self._inverses.get(device)
        if cached is not None and cached[0] == scale:
            return cached[1]
        value = _invert(scale, strict)
        if cached is None:
            inverse = torch.full((), value, dtype=torch.float32, device=device)
        else:
            inverse = cached[1].fill_(value)
        self._inverses[device] = (scale, inverse)
        return inverse

    def initial_grad(self, device: torch.device, scale: float) -> Tensor | None:
        """Return `scale` to multiply a loss with or to start a backward pass from; None if fp32 cannot hold it."""
        cached = self._initial_grads.get(device)
        # A hook that changes the gradient it receives in place changes the cached scalar.
        if cached is None or cached[0] != scale or cached[1]._version:
            if not isinstance(scale, (int, float)) or not abs(scale) <= FLOAT32_MAX:
                return None
            cached = self._initial_grads[device] = (scale, torch.full((), scale, dtype=torch.float32, device=device))
        return cached[1]

    def flag(self, device: torch.device) -> Tensor:
        """Return the overflow flag for a kernel to set."""
        self._flags_written = True
        flag = self._flags.get(device)
        if flag is None:
            flag = self._flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        return flag

    def first_device(self) -> torch.device | None:
        """Return the device of the first flag, if any."""
        return next(iter(self._flags), None)

    def clear_flags(self) -> None:
        """Reset the flags that a kernel may have set."""
        if self._flags_written:
            self._flags_written = False
            for flag in self._flags.values():
                flag.zero_()

    def read_flags(self) -> bool:
        """Return whether any flag is set; waits for the devices."""
        overflow = False
        if self._flags_written:
            for flag in self._flags.values():
                if flag.item():
                    overflow = True
            # A flag that was read as 0 needs no reset before the next pass.
            self._flags_written = overflow
        return overflow


def _invert(scale: float, strict: bool) -> float:
    if scale == 0.0 and not strict:
        return FLOAT32_MAX
    # After about 150 overflows in a row 1/scale leaves the fp32 range; an endless overflow is a result, not a crash.
    return min(1.0 / scale, FLOAT32_MAX)
