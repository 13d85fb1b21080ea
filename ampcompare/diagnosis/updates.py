"""Which elements of a weight an optimizer step leaves as they were although their gradient is not zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.diagnosis.watch import short, unseen
from ampcompare.records.diagnosis import LostUpdates

__all__ = ["UpdateCounter"]


class UpdateCounter:
    """Compares weights before and after each step of optimizers, between the hooks that torch calls there.

    An update is lost where it is smaller than half a unit in the last place of the weight.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._names = dict(_named(models, optimizers))
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._counts: list[tuple[str, str, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> UpdateCounter:
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> list[LostUpdates]:
        """Return the counts since the last call, read from the device at once."""
        counts, self._counts = self._counts, []
        if not counts:
            return []
        rows = torch.stack([row for _, _, row in counts]).tolist()
        return [
            LostUpdates(parameter=name, dtype=dtype, moved=moved, lost=lost, nonfinite=broken)
            for (name, dtype, _), (moved, lost, broken) in zip(counts, rows, strict=True)
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with unseen():
            self._before = [
                (param, param.detach().clone(), param.grad != 0)
                for group in optimizer.param_groups
                if float(group.get("lr", 1.0)) != 0
                for param in group["params"]
                if param.grad is not None and not param.grad.is_sparse
            ]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with unseen():
            for param, before, moved in self._before:
                stays = torch.logical_and(moved, param == before)
                broken = param.numel() - torch.count_nonzero(torch.isfinite(param))
                row = torch.stack([torch.count_nonzero(moved), torch.count_nonzero(stays), broken])
                self._counts.append((self._names.get(id(param), "?"), short(param.dtype), row))
        self._before = []


def _named(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, str]]:
    """Yield the name of each parameter; a master weight has that of the next parameter of the model of its shape."""
    named = [
        (f"model{place}.{name}" if len(models) > 1 else name, param)
        for place, model in enumerate(models)
        for name, param in model.named_parameters()
    ]
    yield from ((id(param), name) for name, param in named)
    stepped = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    owned = {id(param) for param in stepped}
    rest = [(name, param) for name, param in named if id(param) not in owned]
    for param in stepped:
        match = next((at for at, (_, other) in enumerate(rest) if other.shape == param.shape), None)
        if match is not None and all(param is not other for _, other in named):
            yield id(param), rest.pop(match)[0]
