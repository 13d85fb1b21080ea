"""torch's FSDP2, `fully_shard`: each rank keeps a part of every weight, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampcompare.parallel.base import Parallel
from ampcompare.parallel.sharding import ShardTypes, is_sharded_model, shard
from ampcompare.tensors.reduction import reduction_type

__all__ = ["FSDP"]


class FSDP(Parallel):
    """`torch.distributed.fsdp.fully_shard`. Weights that an arm has sharded itself stay as they are."""

    waits_in_forward = True

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return model

    def shard(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        whole = [model for model in models if not is_sharded_model(model)]
        if whole:
            shard(whole, optimizers, ShardTypes(reduce=reduction_type(whole[0])))

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    @contextmanager
    def no_sync(self, models: Sequence[Any]) -> Iterator[None]:
        """Keep whole gradients on each rank; weights are gathered anyway."""
        for model in models:
            model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for model in models:
                model.set_requires_gradient_sync(True)
