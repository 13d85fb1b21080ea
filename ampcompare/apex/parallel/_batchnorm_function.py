"""Batch norm over the union of the batches of all ranks, forward and backward, on any device and backend.

Kernels are those of torch's own batch norm, which exist for CPU and CUDA alike. They are called as `torch.ops.aten`,
which no casting policy patches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["GlobalStatistics", "SyncBatchnormFunction", "gather_statistics", "statistics_dtype"]

aten = torch.ops.aten


class GlobalStatistics(NamedTuple):
    """Mean, biased variance and number of elements per channel (shapes [C], [C], [1]) over all ranks."""

    mean: Tensor
    var: Tensor
    elements: Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and arithmetic for an input: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def gather_statistics(
    x: Tensor, group: dist.ProcessGroup | None, world_size: int, equal_ranks: bool
) -> GlobalStatistics:
    """Merge the statistics of all ranks; a collective call if `world_size` is above 1.

    Args:
        x: [N, C, ...], in the dtype of the statistics; N may differ between ranks, and be 0.
        equal_ranks: weigh each rank alike, whatever its N.
    """
    channels = x.size(1)
    count = x.numel() // channels
    if count:
        mean, var = aten.batch_norm_update_stats(x, None, None, 0.0)
    else:
        mean, var = x.new_zeros(channels), x.new_zeros(channels)
    if world_size == 1:
        return GlobalStatistics(mean, var, mean.new_full((1,), count))
    local_statistics = torch.cat([mean, var, mean.new_full((1,), count)])
    everybody = local_statistics.new_empty(world_size, local_statistics.numel())
    # The variants that take one tensor change their name between torch releases.
    dist.all_gather(list(everybody.unbind()), local_statistics, group=group)
    means, variances, counts = everybody.split([channels, channels, 1], dim=1)
    if equal_ranks:
        counts = torch.full_like(counts, count)
    total = counts.sum(0)
    weights = counts / total
    mean = (means * weights).sum(0)
    var = ((variances + (means - mean).square()) * weights).sum(0)
    return GlobalStatistics(mean, var, total)


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    result: Tensor = aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return result


def _local_sums(grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of grad and of grad * (x - mean) / sqrt(var + eps) per channel, on this rank."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    unsaved = mean.new_empty(0)  # in evaluation the CUDA kernel uses running statistics, but requires tensors
    _, scaled, plain = aten.native_batch_norm_backward(
        grad, x, torch.ones_like(mean), mean, var, unsaved, unsaved, False, eps, [False, True, True]
    )
    return plain, scaled


class SyncBatchnormFunction(torch.autograd.Function):
    """Normalize by the statistics of all ranks.

    Inputs are x [N, C, ...], z (of x's shape, added before the activation) or None, weight and bias ([C] or None) and
    the statistics. The result has x's dtype; arithmetic is in `statistics_dtype`. The gradients of weight and bias are
    sums over this rank's batch: averaging gradients over ranks averages these too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: GlobalStatistics,
        eps: float,
        fuse_relu: bool,
        group: dist.ProcessGroup | None,
        world_size: int,
    ) -> Tensor:
        mean, var, elements = statistics
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        wide = x.to(mean.dtype)
        out = _normalize(wide, scale, shift, mean, var, eps) if x.numel() else torch.empty_like(wide)
        if z is not None:
            out = out.add_(z)
        if fuse_relu:
            out = out.relu_()
        out = out.to(x.dtype)
        ctx.save_for_backward(x, weight, mean, var, elements, out if fuse_relu else None)
        ctx.eps, ctx.group, ctx.world_size = eps, group, world_size
        ctx.z_dtype = None if z is None else z.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, elements, out = ctx.saved_tensors
        wants_x, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        if out is not None:
            grad = aten.threshold_backward(grad, out, 0)
        wide_grad, wide_x = grad.to(mean.dtype), x.to(mean.dtype)
        plain, scaled = _local_sums(wide_grad, wide_x, mean, var, ctx.eps)
        grad_weight = scaled.to(weight.dtype) if wants_weight else None
        grad_bias = plain.to(ctx.bias_dtype) if wants_bias else None
        grad_x = None
        if wants_x:
            if ctx.world_size > 1:
                sums = torch.cat([plain, scaled])
                dist.all_reduce(sums, group=ctx.group)
                plain, scaled = sums.chunk(2)
            grad_x = torch.empty_like(wide_x)
            if x.numel():
                factor = torch.rsqrt(var + ctx.eps)
                if weight is not None:
                    factor = factor * weight.to(mean.dtype)
                shape = [1, -1, *[1] * (x.dim() - 2)]
                common = _normalize(wide_x, -factor * scaled / elements, -factor * plain / elements, mean, var, ctx.eps)
                grad_x = common.addcmul_(wide_grad, factor.view(shape))
            grad_x = grad_x.to(x.dtype)
        grad_z = grad.to(ctx.z_dtype) if wants_z else None
        return grad_x, grad_z, grad_weight, grad_bias, None, None, None, None, None
