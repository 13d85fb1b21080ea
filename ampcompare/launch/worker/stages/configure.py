"""The first stage of a cell: the switches of torch that hold for its whole process."""

from __future__ import annotations

import os

import torch

from ampcompare.precision.tf32 import require_tf32, set_tf32
from ampcompare.settings.config import RunConfig

__all__ = ["configure_process"]


def configure_process(config: RunConfig, device: torch.device) -> None:
    """Set the switches of torch that hold for the whole process: device, threads, determinism, cuDNN, TF32.

    Raises:
        EnvironmentUnfit: TF32 was requested and the device lacks it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "xpu":
        torch.xpu.set_device(device)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.recipe.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if config.tf32 == "on":
        require_tf32(device, "--tf32 on")
    if config.tf32 != "torch":
        set_tf32(config.tf32 == "on")
