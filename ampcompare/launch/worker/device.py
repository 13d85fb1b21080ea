"""Which device a rank of a cell uses."""

from __future__ import annotations

import torch

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.launch.distributed_env import DistributedEnv

__all__ = ["local_device"]


def local_device(name: str, world: DistributedEnv) -> str:
    """Return the device of this rank: "auto" and "cuda" mean the GPU of its local rank.

    Raises:
        EnvironmentUnfit: there are fewer GPUs than processes on this machine.
        ConfigError: one GPU was named for several processes.
    """
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        return name
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if ":" in name and world.local_size > 1:
        raise ConfigError(f"device {name} is one GPU for {world.local_size} processes; use --device cuda")
    if torch.cuda.is_available() and world.local_size > torch.cuda.device_count():
        raise EnvironmentUnfit(
            f"{world.local_size} processes were requested on a machine with {torch.cuda.device_count()} GPU(s); use "
            f"--nproc-per-node with at most this many, or --device cpu"
        )
    return name if ":" in name else f"cuda:{world.local_rank}"
