"""What a device can do, asked in one place for CUDA, the other accelerators of torch, and the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["has_float64", "random_state", "set_random_state", "synchronize"]

WITHOUT_FLOAT64 = ("mps", "xpu")  # Metal has none, and of Intel's GPUs some have none


def has_float64(device: torch.device) -> bool:
    """Return whether every device of this type computes in float64."""
    return device.type not in WITHOUT_FLOAT64


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        _module(device).synchronize()


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random generator of a device, as bytes on the host."""
    module = _module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the random generator of a device to what `random_state` returned."""
    module = _module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def _module(device: torch.device) -> Any:
    """Return `torch.cuda`, `torch.mps` or `torch.xpu`."""
    return getattr(torch, device.type)
