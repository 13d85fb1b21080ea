"""Which accelerators besides CUDA torch sees, proved by a product on each."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerators"]


def accelerators(kinds: list[str]) -> dict[str, Any]:
    """Return the accelerators of these types that torch sees, and whether an fp16 product on each is right."""
    torch = importlib.import_module("torch")
    found: list[dict[str, Any]] = []
    for kind in kinds:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            device: dict[str, Any] = {"name": f"{kind}:{index}", "failure": None}
            try:
                ones = torch.ones(16, 16, device=f"{kind}:{index}", dtype=torch.float16)
                if (ones @ ones).sum().item() != 16**3:
                    device["failure"] = "an fp16 product of ones came out wrong"
            except Exception as error:
                device["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found.append(device)
    return {"devices": found}
