"""The autograd function of Apex's Python `SyncBatchNorm`, for scripts that call it themselves.

Source: Apex 25.05, `apex.parallel.sync_batchnorm_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import optimized_sync_batchnorm

__all__ = ["SyncBatchnormFunction"]


class SyncBatchnormFunction(optimized_sync_batchnorm.SyncBatchnormFunction):
    """Normalize by statistics that all ranks agree on already, called by `apply`."""

    @classmethod
    def apply(
        cls,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        eps: float,
        process_group: dist.ProcessGroup | None,
        world_size: int,
    ) -> Any:
        """Return `(input - mean) / sqrt(variance + eps) * weight + bias`, in the input's dtype, shape [N, C, ...].

        Args:
            running_mean: shape [C], mean of the batches of all ranks; likewise `running_variance`, biased.
            world_size: number of ranks, of batches of equal size, that the gradient of `input` sums over.
        """
        ranks = world_size if dist.is_available() and dist.is_initialized() else 1
        count = input.numel() // input.size(1) * ranks
        mean = running_mean.to(optimized_sync_batchnorm.statistics_dtype(input.dtype))
        statistics = optimized_sync_batchnorm.GlobalStatistics(
            mean, running_variance.to(mean.dtype), mean.new_full((1,), count)
        )
        return super().apply(input, None, weight, bias, statistics, eps, False, process_group, ranks)  # type: ignore[no-untyped-call]
