"""torch's FSDP2 with its own mixed precision: fp32 shards as masters, gathered in 16 bits to compute."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from ampcompare.training.parallel.sharding import ShardTypes, shard_models
from ampcompare.training.precision.base import NO_CONTEXT, Prepared
from ampcompare.training.precision.keep_fp32 import find_outermost_kept_modules
from ampcompare.training.precision.native import Native


class FullyShard(Native):
    """`torch.distributed.fsdp.fully_shard` under a `MixedPrecisionPolicy`, over the default process group.

    Gathered weights compute in the type `param`. In fp16 the loss is scaled by `torch.amp.GradScaler`, whose overflow
    flag torch takes over all shards.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        param: str = "bfloat16",
        reduce: str = "float32",
        output: str = "float32",
        keep_fp32: str = "",
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(device=device, dtype=param, init_scale=init_scale, growth_interval=growth_interval)
        self.keep_fp32 = keep_fp32
        self.types = ShardTypes(self.half_dtype, getattr(torch, reduce), getattr(torch, output))

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        kept = find_outermost_kept_modules(models, self.keep_fp32)
        self.kept_fp32 = tuple(kept)
        shard_models(models, optimizers, self.types, list(kept.values()))
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return NO_CONTEXT
