"""The switches of torch that hold for a whole process: each process that trains a recipe sets them once, first."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ampcompare.base.tensors.tf32 import set_tf32
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model
from ampcompare.training.precision.fp32 import require_tf32
from ampcompare.training.process.device import resolve_device


def configure_process(config: RunConfig, device: torch.device) -> None:
    """Set device, threads, determinism, the choice of cuDNN and TF32 for this process, as a configuration says.

    Args:
        config: of the run.
        device: on which it trains.

    Raises:
        BackendUnavailable: `tf32` is "on", and the device has no TF32.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "xpu":
        torch.xpu.set_device(device)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = config.recipe.cudnn_benchmark
    if config.tf32 == "on":
        require_tf32(device, "--tf32 on")
    if config.tf32 != "torch":
        set_tf32(config.tf32 == "on")


def configure_examining_process(values: Mapping[str, Any]) -> tuple[RunConfig, torch.device]:
    """Set up a process that was started to examine a recipe.

    Args:
        values: the fields of its `RunConfig`, as JSON holds them.

    Returns:
        The configuration, and the device that it names.

    Raises:
        EnvironmentUnfit: there is no such device, or it has no TF32 and `tf32` is "on".
    """
    config = build_validated_model(RunConfig, values)
    device = resolve_device(config.device)
    configure_process(config, device)
    return config, device
