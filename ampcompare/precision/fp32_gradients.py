"""Gradients that add up in fp32 over the micro-batches of an update, in the masters of 16-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from ampcompare.precision.optimizer_weights import Masters
from ampcompare.tensors.reduction import average_in

__all__ = ["Fp32Gradients"]


class Fp32Gradients(Masters):
    """Masters whose gradients are sums in fp32: that of each micro-batch is added before the next one comes.

    A wrapper for several processes reduces the gradients of the last micro-batch. The sum of the earlier ones, which it
    left alone under `no_sync`, is reduced here, once.

    Args:
        reduce: the type to reduce in; None for fp32.
    """

    def __init__(self, optimizer: Optimizer, reduce: torch.dtype | None = None) -> None:
        super().__init__(optimizer)
        self._reduce = reduce or torch.float32

    @torch.no_grad()
    def collect(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                grad = param.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            collected: list[Tensor] = [master.grad for master in self._masters if master.grad is not None]
            average_in(self._reduce, collected)
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        self.collect()
