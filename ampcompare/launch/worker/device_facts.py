"""Facts about the device of a cell, for its record."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ampcompare.settings.config import RunConfig

__all__ = ["device_facts"]


def device_facts(device: torch.device, config: RunConfig) -> dict[str, Any]:
    """Return name, versions and switches of a device; a value that torch cannot return is replaced by its error.

    Call it before training: some of these calls raise, which must not end a run.
    """
    facts: dict[str, Any] = {
        "device": str(device),
        "threads": config.threads,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }
    if device.type not in ("cpu", "cuda"):
        kind = getattr(torch, device.type)
        facts["device_name"] = _value_or_error(lambda: kind.get_device_name(device))  # torch.mps has none
        return facts
    if device.type != "cuda":
        return {**facts, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return facts | {
        "device_name": _value_or_error(lambda: torch.cuda.get_device_name(device)),
        "capability": _value_or_error(lambda: list(torch.cuda.get_device_capability(device))),
        "memory_bytes": _value_or_error(lambda: torch.cuda.get_device_properties(device).total_memory),
        "cuda": torch.version.cuda,
        "cudnn": _value_or_error(torch.backends.cudnn.version),  # raises on a GPU too old for it
        # Both raise once any code in the process has used torch's newer switch, `fp32_precision`.
        "tf32_matmul": _value_or_error(lambda: torch.backends.cuda.matmul.allow_tf32),
        "tf32_convolution": _value_or_error(lambda: torch.backends.cudnn.allow_tf32),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _value_or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # versions of torch differ in what they raise
        return f"unknown: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
