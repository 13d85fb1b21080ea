"""torch.compile around a prepared model: the casts of the arm are in its graph, wrappers for several ranks are not."""

from __future__ import annotations

import os
import shutil
from typing import cast

import torch
from torch import nn

from ampcompare.errors import EnvironmentUnfit

__all__ = ["compiled", "cpu_half_of"]

COMPILERS = ("g++", "clang++", "cl", "icpx")


def compiled(model: nn.Module, backend: str, device: torch.device) -> nn.Module:
    """Return `model` compiled by a backend of torch.compile, sharing its parameters; itself for "none".

    Raises:
        EnvironmentUnfit: inductor on a CPU without a C++ compiler.
    """
    if backend == "none":
        return model
    if backend == "inductor" and device.type == "cpu":
        names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
        if not any(shutil.which(name) for name in names):
            raise EnvironmentUnfit(
                f"--compile inductor compiles C++ on a CPU, and none of {', '.join(names)} is there; install one, or "
                "use --compile aot_eager"
            )
    return cast(nn.Module, torch.compile(model, backend=backend))


def cpu_half_of(choice: str, backend: str) -> str:
    """Return how a run computes fp16 on a CPU: emulation works by a mode under which torch.compile gives up."""
    return "native" if choice == "auto" and backend != "none" else choice
