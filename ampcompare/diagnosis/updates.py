"""Which elements of a weight an optimizer step leaves as they were although their gradient is not zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.diagnosis.watch import FP16_ZERO, short, unseen
from ampcompare.records.diagnosis import LostUpdates

__all__ = ["UpdateCounter"]


class UpdateCounter:
    """Compares weights before and after each step of optimizers; its two methods for that are hooks of torch.

    An update is lost where it is smaller than half a unit in the last place of the weight.

    Args:
        named: returns each parameter of the models with its name.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._named = named
        self._names: dict[int, dict[int, str]] = {}  # of parameters, by optimizer
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._counts: list[tuple[str, str, float | None, Tensor]] = []

    def take(self) -> list[LostUpdates]:
        """Return the counts since the last call, read from the device at once."""
        counts, self._counts = self._counts, []
        if not counts:
            return []
        rows = torch.stack([row for *_, row in counts]).tolist()
        return [
            LostUpdates(parameter=name, dtype=dtype, moved=moved, lost=lost, nonfinite=broken, eps=eps)
            for (name, dtype, eps, _), (moved, lost, broken) in zip(counts, rows, strict=True)
        ]

    def before_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Keep the weights that a step will change."""
        with unseen():
            self._before = [
                (param, param.detach().clone(), param.grad != 0)
                for group in optimizer.param_groups
                if float(group.get("lr", 1.0)) != 0
                for param in group["params"]
                if param.grad is not None and not param.grad.is_sparse
            ]

    def after_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Count what the step has changed, and what not."""
        if self._before and id(optimizer) not in self._names:
            self._names[id(optimizer)] = self._names_for(optimizer)
        names = self._names.get(id(optimizer), {})
        eps = _eps_without_value(optimizer)
        with unseen():
            for param, before, moved in self._before:
                name = names.get(id(param), "?")
                self._counts.append((name, short(param.dtype), eps.get(id(param)), _counts(param, before, moved)))
        self._before = []

    def _names_for(self, optimizer: Optimizer) -> dict[int, str]:
        """Return the names of what an optimizer steps; a master weight has that of the next parameter of its shape."""
        known = list(self._named())
        names = {id(param): name for name, param in known}
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        taken = {name for held in self._names.values() for name in held.values()}
        taken |= {names[id(param)] for param in stepped if id(param) in names}
        rest = [(name, param) for name, param in known if name not in taken and param.requires_grad]
        for param in stepped:
            if id(param) not in names:
                match = next((at for at, (_, other) in enumerate(rest) if other.shape == param.shape), None)
                if match is not None:
                    names[id(param)] = rest.pop(match)[0]
        return {id(param): names[id(param)] for param in stepped if id(param) in names}


def _eps_without_value(optimizer: Optimizer) -> dict[int, float]:
    """Return the eps of each fp16 weight in whose type it is zero; a fused step computes in fp32."""
    return {
        id(param): float(group["eps"])
        for group in optimizer.param_groups
        if isinstance(group.get("eps"), float) and 0 < group["eps"] <= FP16_ZERO and not group.get("fused")
        for param in group["params"]
        if param.dtype is torch.float16
    }


def _counts(param: Tensor, before: Tensor, moved: Tensor) -> Tensor:
    """Return how many elements should have moved, how many of them stayed, and how many are not finite, (3,)."""
    if param.device.type == "cpu" and param.dtype is torch.float32:
        return torch.tensor(_host_counts(param.detach().numpy(), before.numpy(), moved.numpy()))
    same = param == before
    lost = broken = torch.zeros((), dtype=torch.int64, device=param.device)
    on_host = param.device.type == "cpu"  # where a look at the counts saves most of the work
    if not on_host or bool(same.any()):
        lost = torch.count_nonzero(same.logical_and_(moved))
    if not on_host or not all(map(math.isfinite, torch.aminmax(param.detach()))):
        broken = param.numel() - torch.count_nonzero(torch.isfinite(param))
    return torch.stack([torch.count_nonzero(moved), lost, broken])


def _host_counts(now: np.ndarray, before: np.ndarray, moved: np.ndarray) -> list[int]:
    """Return the same counts of fp32 weights on the host, where NumPy compares several times as fast as torch."""
    lost = int(np.count_nonzero((now == before) & moved))
    is_finite = now.size == 0 or (math.isfinite(now.min()) and math.isfinite(now.max()))
    broken = 0 if is_finite else now.size - int(np.count_nonzero(np.isfinite(now)))
    return [int(np.count_nonzero(moved)), lost, broken]
