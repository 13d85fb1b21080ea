"""Which device a process of a cell uses."""

from __future__ import annotations

import torch

from ampcompare.errors import ConfigError, EnvironmentUnfit
from ampcompare.launch.distributed_env import DistributedEnv

__all__ = ["local_device", "resolve_device"]


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:INDEX"; a GPU always with its index.

    Raises:
        EnvironmentUnfit: the GPU that was asked for does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            raise EnvironmentUnfit(
                f"device {name} was asked for and {reason}; use --device cpu, or install torch for CUDA"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise EnvironmentUnfit(
                f"device {name} was asked for and there are {torch.cuda.device_count()} GPUs, from cuda:0"
            )
        if device.index is None:  # `torch.cuda.set_device` requires an index
            return torch.device("cuda", torch.cuda.current_device())
    return device


def local_device(name: str, world: DistributedEnv) -> str:
    """Return the device of this rank: "auto" and "cuda" mean the GPU of its local rank.

    Raises:
        EnvironmentUnfit: there are fewer GPUs than processes on this machine.
        ConfigError: one GPU was named for several processes.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if ":" in name and world.local_size > 1:
        raise ConfigError(f"device {name} is one GPU for {world.local_size} processes; use --device cuda")
    if torch.cuda.is_available() and world.local_size > torch.cuda.device_count():
        raise EnvironmentUnfit(
            f"{world.local_size} processes were asked for on a machine with {torch.cuda.device_count()} GPU(s); "
            "use --nproc-per-node with at most this many, or --device cpu"
        )
    return name if ":" in name else f"cuda:{world.local_rank}"
