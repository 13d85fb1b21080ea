"""torch's `DataParallel`: one process copies the model to all its GPUs at each step and splits the batch over them."""

from __future__ import annotations

from torch import nn

from ampcompare.parallel.base import Parallel

__all__ = ["DP"]


class DP(Parallel):
    """`torch.nn.DataParallel` over every visible GPU.

    An arm that replaces `forward` on the instance must give each replica its own `forward`, or all replicas run
    the first one's weights: this package's engine does, the real Apex does not.
    """

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model)
