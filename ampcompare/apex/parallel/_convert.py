"""Replace batch norms by synchronized ones, and make the groups over which they synchronize."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ampcompare.apex import deprecated_warning
from ampcompare.apex.amp._amp_state import strict_from_environment

from ._errors import ParallelArgumentError
from ._synchronizer import require_group
from .optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["convert_syncbn_model", "create_syncbn_process_group"]


def convert_syncbn_model(
    module: Any, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Any:
    """Replace every batch norm below `module` by `SyncBatchNorm`, in place, and return the root.

    Use the returned module: a root that is a batch norm itself is replaced by a new object. Parameters and buffers are
    shared with the old layers, so that optimizers built before stay valid; instance norms, and what is below them, are
    left alone. With `AMPCOMPARE_APEX_STRICT=1` the new layers are in training mode with trainable copies of weight and
    bias whatever the old ones were, as in Apex.

    Args:
        process_group: ranks that share statistics; see `create_syncbn_process_group`. None means all.
        channel_last: the channel is the last dimension of the layers' inputs.
    """
    deprecated_warning(
        "apex.parallel.convert_syncbn_model is deprecated and was removed from Apex in May 2025. Use "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm."
    )
    return _convert(module, process_group, channel_last, strict_from_environment(), {})


def _convert(
    module: nn.Module, group: dist.ProcessGroup | None, channel_last: bool, strict: bool, done: dict[int, nn.Module]
) -> nn.Module:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module
    # A layer used in two places stays one layer.
    if id(module) in done:
        return done[id(module)]
    result = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        result = _synchronized(module, group, channel_last, strict)
    done[id(module)] = result
    # Not `named_children`, which names a child that is in two places once.
    for name, child in module._modules.items():
        if child is not None:
            result.add_module(name, _convert(child, group, channel_last, strict, done))
    return result


def _synchronized(
    old: nn.modules.batchnorm._BatchNorm, group: dist.ProcessGroup | None, channel_last: bool, strict: bool
) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, group, channel_last
    )
    new.running_mean = old.running_mean
    new.running_var = old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    for name, param in old._parameters.items():
        new._parameters[name] = nn.Parameter(param.detach().clone()) if strict and param is not None else param
    if not strict:
        new.train(old.training)
        new.fuse_relu = getattr(old, "fuse_relu", False)
    return new


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Split all ranks into groups of `group_size` consecutive ones and return this rank's; a collective call.

    Args:
        group_size: a divisor of the world size; 0 means all ranks, for which the result is None.

    Raises:
        ParallelArgumentError: the world size is smaller than `group_size` or no multiple of it (`AssertionError`).
    """
    if group_size == 0:
        return None
    require_group("create_syncbn_process_group")
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
