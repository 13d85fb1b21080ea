"""Cast weights to half in groups: on CUDA one kernel forward and one backward for a group, not for each weight.

O1 casts a weight on first use. Later iterations cast weights ahead in that order, in groups of eight;
a group is small enough for gradients to arrive while the backward pass runs, as gradient reduction needs it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["CastGroups"]

_MAX_GROUP = 8
_SMALLEST = 4


class CastGroups:
    """Which weights are cast together, learned from the order in which they were met."""

    def __init__(self) -> None:
        self._groups: dict[int, list[weakref.ref[Tensor]]] = {}
        self._met: list[weakref.ref[Tensor]] = []

    def cast(self, leader: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return `(weight, half cast)` for the group that `leader` begins; empty where it is to be cast by itself.

        The first pair is that of `leader`. Casts carry gradients to their weights, rounded as those of `Tensor.half`.
        """
        if not leader.is_cuda or not leader.requires_grad:  # a launch costs a CPU less than the Python around it
            return []
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return []  # they see into a cast, and not into a group
        if torch._C._are_functorch_transforms_active():
            return []
        references = self._groups.get(id(leader))
        if references is None or references[0]() is not leader:
            self._met.append(weakref.ref(leader))
            return []
        weights = [weight for reference in references if (weight := reference()) is not None and _fits(weight, leader)]
        casts: tuple[Tensor, ...] = _CastGroup.apply(*weights)  # type: ignore[no-untyped-call]
        return list(zip(weights, casts, strict=True))

    def learn(self) -> None:
        """Group what was met one by one since the last call."""
        met, self._met = self._met, []
        for first in range(0, len(met), _MAX_GROUP):
            group = met[first : first + _MAX_GROUP]
            leader = group[0]()
            if len(group) >= _SMALLEST and leader is not None:
                self._groups[id(leader)] = group


def _fits(weight: Tensor, leader: Tensor) -> bool:
    return (
        weight.requires_grad
        and weight.dtype is torch.float32
        and weight.device == leader.device
        and weight.layout is torch.strided
    )


class _CastGroup(torch.autograd.Function):
    """Casts to half whose gradients come back in fp32; several weights share a kernel."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        casts = [torch.empty_like(weight, dtype=torch.float16) for weight in weights]
        torch._foreach_copy_(casts, weights)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled() or any(grad.layout is not torch.strided for grad in present):
            return tuple([None if grad is None else grad.float() for grad in grads])
        full = [torch.empty_like(grad, dtype=torch.float32) for grad in present]
        if full:
            torch._foreach_copy_(full, present)
        remaining = iter(full)
        return tuple([None if grad is None else next(remaining) for grad in grads])
