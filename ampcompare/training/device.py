"""The device that a setting names."""

from __future__ import annotations

import torch

from ampcompare.base.environment.gpus import ACCELERATORS, accelerator_of
from ampcompare.base.errors import EnvironmentUnfit

__all__ = ["resolve_device"]


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "mps" or "xpu", or with an index; a GPU always has one.

    Raises:
        EnvironmentUnfit: the GPU that was asked for does not exist.
    """
    kind = accelerator_of(name)
    if kind:
        return _accelerator(name, kind)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            raise EnvironmentUnfit(
                f"device {name} was requested, but {reason}; use --device cpu, or install torch for CUDA"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise EnvironmentUnfit(
                f"device {name} was requested, but there are {torch.cuda.device_count()} GPUs, starting at cuda:0"
            )
        if device.index is None:  # `torch.cuda.set_device` requires an index
            return torch.device("cuda", torch.cuda.current_device())
    return device


def _accelerator(name: str, kind: str) -> torch.device:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        of = ACCELERATORS[kind]
        raise EnvironmentUnfit(
            f"device {name} was requested ({of.title}), but torch sees none; use --device cpu ({of.remedy})"
        )
    device = torch.device(name)
    count = module.device_count()
    if device.index is not None and device.index >= count:
        raise EnvironmentUnfit(f"device {name} was requested, but there are {count} such devices, starting at {kind}:0")
    return torch.device(kind, device.index or 0)
