"""torch.compile around a prepared model: its graph contains the casts of the arm, but no wrapper for several ranks."""

from __future__ import annotations

import os
import shutil
from typing import Any, cast

import torch
from torch import Tensor, nn

from ampcompare.base.errors import EnvironmentUnfit

__all__ = ["compiled", "cpu_half_of", "ready_compiler"]

COMPILERS = ("g++", "clang++", "cl", "icpx")


def ready_compiler(backend: str) -> None:
    """Let torch.compile record torch's functions by name, before an arm replaces some of them: call it first.

    It records them at its first use. After O1 it would take ampcompare's functions for torch's.
    """
    if backend != "none":
        torch.compile(_first_use, backend="eager")(torch.zeros(1))


def _first_use(value: Tensor) -> Tensor:
    return torch.relu(value).add(1).float()


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
                f"--compile inductor compiles C++ on a CPU, but found none of {', '.join(names)}; install one, or "
                "use --compile aot_eager"
            )
    return cast(nn.Module, torch.compile(_Whole(model), backend=backend))


class _Whole(nn.Module):
    """Calls a model in a separate frame, so that its hooks are in the graph, and models of torch's own classes too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def cpu_half_of(choice: str, backend: str) -> str:
    """Return how a run computes fp16 on a CPU: torch.compile does not work under the dispatch mode that emulates it."""
    return "native" if choice == "auto" and backend != "none" else choice
