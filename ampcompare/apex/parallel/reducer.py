"""`Reducer`: average gradients on request, instead of during the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ._buckets import Bucket, Reduction
from ._plan import plan_by_type
from ._replicas import broadcast_from_first, flat_dist_call, require_group

__all__ = ["Reducer"]


def _extract(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    else:
        for value in values:
            yield from _extract(value)


class Reducer:
    """Average the gradients of a module, or given tensors, over all ranks at each call of `reduce`.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 here and whose gradients `reduce`
            averages; or tensors in nested lists, which `reduce` averages in place.

    Source: Apex 25.05, `apex.parallel.Reducer`.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            broadcast_from_first(self.module.parameters(), None)
        else:
            self.grads = list(_extract(module_or_grads_list))

    def reduce(self) -> None:
        """Average over all ranks, flattened by dtype; a collective call.

        A parameter with a gradient on some ranks only gets the average everywhere, in which the others count as zero.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        params = [param for param in self.module.parameters() if param.requires_grad or param.grad is not None]
        reduction = Reduction(after=1.0 / dist.get_world_size())
        for indices in plan_by_type(params, range(len(params))).buckets:
            bucket = Bucket([params[i] for i in indices], reduction)
            flat = bucket.reserve()
            bucket.fill()
            dist.all_reduce(flat)
            bucket.scatter()
            bucket.adopt()
