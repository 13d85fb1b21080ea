"""The `SyncBatchNorm` that Apex falls back to without compiled kernels, under the name by which tests import it.

Source: Apex 25.05, `apex.parallel.sync_batchnorm`; what differs is in `docs/deviations.md`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ampcompare.apex import deprecated_warning, strict_from_environment
from ampcompare.base.errors import ConfigError

from .optimized_sync_batchnorm import SyncBatchNorm as OptimizedSyncBatchNorm

__all__ = ["SyncBatchNorm"]


class UnavailableInPythonSyncBatchNorm(ConfigError, AttributeError):
    """An option that only the optimized `SyncBatchNorm` has."""


class SyncBatchNorm(OptimizedSyncBatchNorm):
    """Batch norm over all ranks, channels in dimension 1, without fused operations.

    It computes what the optimized class does. With `AMPCOMPARE_APEX_STRICT=1` at construction it has Apex's limits:
    ranks weigh the same whatever their batch, and inputs are cast to the layer's dtype, which the result keeps.

    Raises:
        UnavailableInPythonSyncBatchNorm: `channel_last=True` (an `AttributeError`).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
    ) -> None:
        deprecated_warning(
            "apex.parallel.SyncBatchNorm is deprecated and was removed from Apex in May 2025. Use "
            "torch.nn.SyncBatchNorm."
        )
        if channel_last:
            raise UnavailableInPythonSyncBatchNorm(
                "channel_last=True is not supported by apex.parallel.sync_batchnorm.SyncBatchNorm. Use "
                "apex.parallel.SyncBatchNorm."
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self._equal_ranks = strict_from_environment()

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input` [N, C, ...]; `z` is added if given."""
        if self._equal_ranks:
            layer = self.weight if self.running_mean is None else self.running_mean
            input = input if layer is None else input.to(layer.dtype)
        return super().forward(input, z)
