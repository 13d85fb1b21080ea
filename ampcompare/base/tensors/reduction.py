"""The type in which gradients are averaged over ranks: noted on a model, and applied by what wraps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

__all__ = ["average_in", "note_reduction_type", "reduce_buckets_in", "reduction_type"]

ATTRIBUTE = "_ampcompare_reduction_type"


def note_reduction_type(model: nn.Module, dtype: torch.dtype) -> None:
    """Ask what wraps `model` for several processes to average its gradients in `dtype`."""
    setattr(model, ATTRIBUTE, dtype)


def reduction_type(model: nn.Module) -> torch.dtype | None:
    """Return the type that was asked for; None for that of each gradient."""
    found: torch.dtype | None = getattr(model, ATTRIBUTE, None)
    return found


def reduce_buckets_in(dtype: torch.dtype, bucket: Any) -> Any:
    """Average a bucket of `DistributedDataParallel` over all ranks in `dtype`; a communication hook with its state."""
    buffer = bucket.buffer()
    # Divided before the sum, as DDP does it, so that a sum in fp16 does not overflow.
    moved = buffer.to(dtype) / distributed.get_world_size()
    future = distributed.all_reduce(moved, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def average_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
    """Average tensors over all ranks in `dtype`, in place; every rank passes tensors of the same shapes."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]) / distributed.get_world_size()
    distributed.all_reduce(flat)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
