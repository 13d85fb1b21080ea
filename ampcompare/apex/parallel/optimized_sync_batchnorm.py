"""`SyncBatchNorm`: batch norm over the batches of all ranks, with channel-last layout, added input and fused ReLU.

Source: Apex 25.05, `apex.parallel.optimized_sync_batchnorm`; what differs is in `docs/deviations-parallel.md`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ._batchnorm_function import GlobalStatistics, SyncBatchnormFunction, gather_statistics, statistics_dtype
from ._errors import SyncBatchNormInputError

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics span the batches of all ranks of a process group.

    Statistics and arithmetic are fp32 (fp64 for fp64 inputs), the result has the input's dtype. Ranks are weighted by
    their number of elements, so that batches may differ in size. Without a process group it is plain batch norm.

    Args:
        num_features: number of channels C.
        momentum: weight of the new statistics; None means the average over all batches so far.
        process_group: ranks to work with; None means all.
        channel_last: the channel is the last dimension, instead of dimension 1; 2-D inputs are the same either way.
        fuse_relu: apply ReLU to the result (after `z` was added).

    The gradients of weight and bias are sums over this rank's batch, as a wrapper that averages gradients expects.
    """

    # Apex keeps the ImportError of its compiled kernels here; these need none.
    syncbn_import_error: ClassVar[ImportError | None] = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps=eps, momentum=momentum, affine=affine, track_running_stats=track_running_stats
        )
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        self._equal_ranks = False

    def _specify_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input`, add `z`, and apply ReLU if `fuse_relu`.

        Args:
            input: [N, C], [N, C, ...], or with `channel_last` [N, ..., C]; any floating dtype.
            z: of the shape of `input`.

        Returns:
            A tensor of the shape and dtype of `input`.

        Raises:
            SyncBatchNormInputError: other channels than `num_features`, or in training a single value per channel on
                a single rank (a `ValueError`).
        """
        last = self.channel_last and input.dim() > 2
        channels = input.size(-1 if last else 1) if input.dim() >= 2 else -1
        if channels != self.num_features:
            raise SyncBatchNormInputError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape {tuple(input.shape)} with "
                f"channel_last={self.channel_last}. Give it [N, C, ...], or [N, ..., C] with channel_last=True."
            )
        if not last:
            return self._normalize(input, z)
        rows = None if z is None else z.reshape(-1, channels)
        return self._normalize(input.reshape(-1, channels), rows).view(input.shape)

    def _normalize(self, x: Tensor, z: Tensor | None) -> Tensor:
        if self.training:
            return self._by_batch(x, z, self._world_size())
        if self.running_mean is None or self.running_var is None:
            # A rank may evaluate alone, so there is no communication.
            return self._by_batch(x, z, 1)
        dtype = statistics_dtype(x.dtype)
        out = F.batch_norm(
            x.to(dtype),
            self.running_mean.to(dtype),
            self.running_var.to(dtype),
            None if self.weight is None else self.weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
            False,
            0.0,
            self.eps,
        )
        if z is not None:
            out = out + z
        return (F.relu(out) if self.fuse_relu else out).to(x.dtype)

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def _by_batch(self, x: Tensor, z: Tensor | None, world_size: int) -> Tensor:
        if world_size == 1 and x.numel() <= x.size(1):
            raise SyncBatchNormInputError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}. Use a batch "
                "of more than one, drop_last=True in the loader, or eval() for a single sample."
            )
        with torch.no_grad():
            statistics = gather_statistics(
                x.to(statistics_dtype(x.dtype)), self.process_group, world_size, self._equal_ranks
            )
            if self.training:
                self._track(statistics)
        out: Tensor = SyncBatchnormFunction.apply(  # type: ignore[no-untyped-call]
            x, z, self.weight, self.bias, statistics, self.eps, self.fuse_relu, self.process_group, world_size
        )
        return out

    def _track(self, statistics: GlobalStatistics) -> None:
        """Move the running statistics; the variance with its unbiased estimate."""
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor: float | Tensor
        if self.momentum is None:
            assert self.num_batches_tracked is not None
            # Divided on the device, in fp64 as Python would: a number would be waited for.
            factor = (1.0 / self.num_batches_tracked.double()).to(statistics.mean.dtype)
        else:
            factor = self.momentum
        mean, var, elements = statistics
        unbiased = var * (elements / (elements - 1).clamp(min=1))
        for buffer, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            buffer.copy_(buffer.to(value.dtype).lerp(value, factor))
