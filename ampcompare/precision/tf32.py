"""TF32: fp32 products and convolutions on NVIDIA tensor cores, with 10 bits of mantissa; a switch of the process."""

from __future__ import annotations

import torch

from ampcompare.errors import BackendUnavailable

__all__ = ["require_tf32", "set_tf32"]

MIN_CAPABILITY = (8, 0)


def require_tf32(device: torch.device, asked_by: str) -> None:
    """Check that a device supports TF32; on any other the switch would silently do nothing.

    Args:
        asked_by: the arm or option that asks for it, for the message.

    Raises:
        BackendUnavailable: names the device, and what to use instead.
    """
    if device.type != "cuda":
        raise BackendUnavailable(
            f"{asked_by} asks for TF32, a mode of NVIDIA GPUs from compute capability 8.0 on, and the device is "
            f"{device}; leave it out, or use --device cuda"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise BackendUnavailable(
            f"{asked_by} asks for TF32, which compute capability 8.0 brought, and {torch.cuda.get_device_name(device)} "
            f"has {capability[0]}.{capability[1]}; leave it out"
        )


def set_tf32(on: bool) -> None:
    """Switch TF32 on or off for fp32 matrix products and convolutions of this process."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on
