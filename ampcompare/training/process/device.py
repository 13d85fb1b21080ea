"""The device that a setting names, and what a device can do: CUDA, the other accelerators of torch, and the CPU."""

from typing import Any

import torch
from torch import Tensor

from ampcompare.base.environment.gpus import ACCELERATORS, non_cuda_accelerator_type
from ampcompare.base.errors import EnvironmentUnfit

WITHOUT_FLOAT64 = ("mps", "xpu")  # Metal has none, and of Intel's GPUs some have none


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "mps" or "xpu", or with an index; a GPU always has one.

    Raises:
        EnvironmentUnfit: torch sees no such device, or fewer of them.
    """
    kind = non_cuda_accelerator_type(name)
    if kind:
        return _resolve_accelerator_device(name, kind)
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


def _resolve_accelerator_device(name: str, kind: str) -> torch.device:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        of = ACCELERATORS[kind]
        raise EnvironmentUnfit(
            f"device {name} was requested ({of.title}), but torch sees none; use --device cpu ({of.remedy})"
        )
    device = torch.device(name)
    count = module.device_count()
    if device.index is not None and device.index >= count:
        raise EnvironmentUnfit(
            f"device {name} was requested, but there are {count} such devices, starting at {kind}:0"
        )
    return torch.device(kind, device.index or 0)


def has_float64(device: torch.device) -> bool:
    """Return whether every device of this type computes in float64."""
    return device.type not in WITHOUT_FLOAT64


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has finished its work; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        _torch_module_of_device(device).synchronize()


def generator_state_of(device: torch.device) -> Tensor:
    """Return the state of the random generator of a device, as bytes on the host."""
    module = _torch_module_of_device(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Set the random generator of a device to what `generator_state_of` returned."""
    module = _torch_module_of_device(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def _torch_module_of_device(device: torch.device) -> Any:
    """Return `torch.cuda`, `torch.mps` or `torch.xpu`."""
    return getattr(torch, device.type)
