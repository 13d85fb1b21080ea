"""Whether torch can use a GPU. Runs in a child process: one that forks cells must not start CUDA."""

from __future__ import annotations

import torch

__all__ = ["sees_gpu"]


def sees_gpu() -> dict[str, bool]:
    """Return whether CUDA or ROCm is available."""
    return {"available": torch.cuda.is_available()}
