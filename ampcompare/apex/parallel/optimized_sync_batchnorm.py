"""`SyncBatchNorm`: batch norm over the batches of all ranks, with channel-last layout, added input and fused ReLU.

Source: Apex 25.05, `apex.parallel.optimized_sync_batchnorm`; what differs is in `docs/deviations.md`. Its kernels are
those of torch's own batch norm, for CPU and CUDA, called as `torch.ops.aten`, which no casting policy patches.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ampcompare.apex import deprecated_warning
from ampcompare.base.errors import ConfigError, PreparationError

from ._synchronizer import require_process_group


class ParallelArgumentError(ConfigError, AssertionError):
    """An argument that Apex checks by an assertion."""


class SyncBatchNormInputError(PreparationError, ValueError):
    """An input that batch norm cannot normalize."""


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics span the batches of all ranks of a process group.

    Statistics and arithmetic are fp32 (fp64 for fp64 inputs), the result has the input's dtype. Ranks are weighted by
    their number of elements, so that batches may differ in size. Without a process group it is plain batch norm.

    With `channel_last` the channel is the last dimension, instead of dimension 1; with `fuse_relu` ReLU follows.

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

    def _specify_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input`, add `z`, of its shape, and apply ReLU if `fuse_relu`; the result has the input's dtype.

        `input` is [N, C], [N, C, ...], or with `channel_last` [N, ..., C]. Other channels, or in training a single
        value per channel on a single rank, are a `SyncBatchNormInputError` (a ValueError).
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
            return self._normalize_by_batch_statistics(x, z, self._world_size())
        if self.running_mean is None or self.running_var is None:
            # A rank may evaluate alone, so there is no communication.
            return self._normalize_by_batch_statistics(x, z, 1)
        dtype = _statistics_dtype(x.dtype)
        mean, var = self.running_mean.to(dtype), self.running_var.to(dtype)
        weight, bias = (None if param is None else param.to(dtype) for param in (self.weight, self.bias))
        out = F.batch_norm(x.to(dtype), mean, var, weight, bias, False, 0.0, self.eps)
        if z is not None:
            out = out + z
        return (F.relu(out) if self.fuse_relu else out).to(x.dtype)

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def _normalize_by_batch_statistics(self, x: Tensor, z: Tensor | None, world_size: int) -> Tensor:
        if world_size == 1 and x.numel() <= x.size(1):
            raise SyncBatchNormInputError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}. Use a batch "
                "of more than one, drop_last=True in the loader, or eval() for a single sample."
            )
        with torch.no_grad():
            statistics = _gather_statistics(x.to(_statistics_dtype(x.dtype)), self.process_group, world_size)
            if self.training:
                self._update_running_statistics(statistics)
        out: Tensor = SyncBatchnormFunction.apply(  # type: ignore[no-untyped-call]
            x, z, self.weight, self.bias, statistics, self.eps, self.fuse_relu, self.process_group, world_size
        )
        return out

    def _update_running_statistics(self, statistics: GlobalStatistics) -> None:
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


aten = torch.ops.aten


class GlobalStatistics(NamedTuple):
    """Mean, biased variance and number of elements per channel (shapes [C], [C], [1]) over all ranks."""

    mean: Tensor
    var: Tensor
    elements: Tensor


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and arithmetic for an input: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def _gather_statistics(x: Tensor, group: dist.ProcessGroup | None, world_size: int) -> GlobalStatistics:
    """Merge the statistics of all ranks; a collective call if `world_size` is above 1.

    Args:
        x: [N, C, ...], in the dtype of the statistics; N may differ between ranks, and be 0.
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
    total = counts.sum(0)
    weights = counts / total
    mean = (means * weights).sum(0)
    var = ((variances + (means - mean).square()) * weights).sum(0)
    return GlobalStatistics(mean, var, total)


def _normalize_by_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    result: Tensor = aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return result


def _local_gradient_sums(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of grad and of grad * (x - mean) / sqrt(var + eps) per channel, on this rank."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    unsaved = mean.new_empty(0)  # in evaluation the CUDA kernel uses running statistics, but requires tensors
    _, scaled, plain = aten.native_batch_norm_backward(
        grad, x, torch.ones_like(mean), mean, var, unsaved, unsaved, False, eps, [False, True, True]
    )
    return plain, scaled


class SyncBatchnormFunction(torch.autograd.Function):
    """Normalize x [N, C, ...] by the statistics of all ranks, in their dtype; the result has x's dtype."""

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
        out = (
            _normalize_by_statistics(wide, scale, shift, mean, var, eps)
            if x.numel()
            else torch.empty_like(wide)
        )
        if z is not None:
            out = out.add_(z)
        if fuse_relu:
            out = out.relu_()
        out = out.to(x.dtype)
        ctx.save_for_backward(x, weight, mean, var, elements, out if fuse_relu else None)
        ctx.eps = eps
        ctx.group = group
        ctx.world_size = world_size
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
        plain, scaled = _local_gradient_sums(wide_grad, wide_x, mean, var, ctx.eps)
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
                common = _normalize_by_statistics(
                    wide_x, -factor * scaled / elements, -factor * plain / elements, mean, var, ctx.eps
                )
                grad_x = common.addcmul_(wide_grad, factor.view(shape))
            grad_x = grad_x.to(x.dtype)
        grad_z = grad.to(ctx.z_dtype) if wants_z else None
        return grad_x, grad_z, grad_weight, grad_bias, None, None, None, None, None


def convert_syncbn_model(
    module: Any, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Any:
    """Replace every batch norm below `module` by `SyncBatchNorm`, in place, and return the root.

    Use the returned module: a root that is a batch norm itself is replaced by a new object. Parameters and buffers are
    shared with the old layers, so that optimizers built before stay valid; instance norms, and what is below them, are
    left alone.
    """
    deprecated_warning(
        "apex.parallel.convert_syncbn_model is deprecated and was removed from Apex in May 2025; use "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm."
    )
    return _convert_batch_norms(module, process_group, channel_last, {})


def _convert_batch_norms(
    module: nn.Module, group: dist.ProcessGroup | None, channel_last: bool, done: dict[int, nn.Module]
) -> nn.Module:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module
    # A layer used in two places stays one layer.
    if id(module) in done:
        return done[id(module)]
    result = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        result = _make_sync_batch_norm(module, group, channel_last)
    done[id(module)] = result
    # Not `named_children`, which names a child that is in two places once.
    for name, child in module._modules.items():
        if child is not None:
            result.add_module(name, _convert_batch_norms(child, group, channel_last, done))
    return result


def _make_sync_batch_norm(
    old: nn.modules.batchnorm._BatchNorm, group: dist.ProcessGroup | None, channel_last: bool
) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, group, channel_last
    )
    new.running_mean = old.running_mean
    new.running_var = old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new._parameters.update(old._parameters)
    new.train(old.training)
    new.fuse_relu = getattr(old, "fuse_relu", False)
    return new


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Split all ranks into groups of `group_size` consecutive ones and return this rank's; a collective call.

    A size of 0 means all ranks, for which the result is None; one that does not divide the world size is a
    `ParallelArgumentError` (an AssertionError).
    """
    if group_size == 0:
        return None
    require_process_group("create_syncbn_process_group")
    world_size = dist.get_world_size()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise ParallelArgumentError(
            f"Groups of {group_size} ranks do not divide {world_size} ranks. Choose a divisor of the world size, or "
            "0 for one group of all."
        )
    own_group = None
    for first in range(0, world_size, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            own_group = group
    return own_group
