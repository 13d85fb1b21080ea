"""What torch sees of the GPUs, proved by a product on each."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["gpus"]


def gpus() -> dict[str, Any]:
    """Start CUDA (or ROCm) and return each GPU, and whether an fp16 product on it is right."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"available": False, "devices": []}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device: dict[str, Any] = {
            "index": index,
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "total_bytes": properties.total_memory,
            "free_bytes": None,
            "failure": None,
        }
        try:
            device["free_bytes"] = torch.cuda.mem_get_info(index)[0]
            ones = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.float16)
            if (ones @ ones).sum().item() != 16**3:
                device["failure"] = "an fp16 product of ones came out wrong"
        except Exception as error:
            device["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        devices.append(device)
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return {
        "available": True,
        "devices": devices,
        "built_for": list(torch.cuda.get_arch_list()),
        "nccl": list(torch.cuda.nccl.version()) if has_nccl else None,
    }
