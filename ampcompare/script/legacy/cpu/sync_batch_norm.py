"""`torch.nn.SyncBatchNorm` on a CPU, where torch has none: ampcompare's, over the same ranks.

The class, its parameters and its checkpoints stay torch's; only `forward` is replaced.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampcompare.script.legacy.stderr import note

__all__ = ["sync_batch_norm_on_cpu"]

PARTS = ("_normalize", "_world_size", "_by_batch", "_track")  # of ampcompare's, which know torch's attributes


def sync_batch_norm_on_cpu(*, quiet: bool = False) -> None:
    """Replace what torch refuses on a CPU, with one line on stderr at the first layer in a process group."""
    kind: Any = nn.SyncBatchNorm
    noted = quiet

    def forward(self: Any, input: Tensor) -> Tensor:
        nonlocal noted
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if not (dist.is_available() and dist.is_initialized()):
            return _BatchNorm.forward(self, input)
        ranks = dist.get_world_size(self.process_group)
        if not noted:
            noted = True
            note(
                "torch.nn.SyncBatchNorm has no kernels for a CPU: "
                + ("on one rank it is plain batch norm" if ranks == 1 else f"ampcompare's runs over {ranks} ranks")
            )
        if ranks == 1:
            return _BatchNorm.forward(self, input)
        _add_parts(kind)
        result: Tensor = self._normalize(input, None)
        return result

    kind.forward = forward
    # It only refuses to wrap such layers on a CPU.
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = (  # type: ignore[method-assign]
        lambda self, module: None
    )


def _add_parts(kind: Any) -> None:
    if hasattr(kind, PARTS[0]):
        return
    ours = importlib.import_module("ampcompare.apex.parallel.optimized_sync_batchnorm").SyncBatchNorm
    for name in PARTS:
        setattr(kind, name, vars(ours)[name])
    kind.fuse_relu = kind._equal_ranks = False
