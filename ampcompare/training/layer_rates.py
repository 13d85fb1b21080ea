"""Layer-wise learning rates, LARC or LARS, on any optimizer."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["LayerRates"]


class LayerRates:
    """LARC or LARS on an optimizer with weight decay, by hooks: they adapt gradients in its step, after unscaling.

    A step that an overflow skips adapts nothing. Under O2 the hooks adapt the gradients of the fp32 masters.
    """

    def __init__(self, trust_coefficient: float, *, clip: bool) -> None:
        self._trust_coefficient = trust_coefficient
        self._clip = clip
        self._decays: list[float] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Adapt the gradients of every step of `optimizer`."""
        larc = importlib.import_module("ampcompare.apex.parallel.LARC").LARC
        self._rates = larc(optimizer, trust_coefficient=self._trust_coefficient, clip=self._clip)
        optimizer.register_step_pre_hook(self._adapt)
        optimizer.register_step_post_hook(self._restore_decays)

    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            self._rates.adapt(group, decay)
            group["weight_decay"] = 0.0  # already part of the adapted gradients

    def _restore_decays(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = decay
