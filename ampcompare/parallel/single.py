"""One process, one replica: nothing to do."""

from __future__ import annotations

from torch import nn

from ampcompare.parallel.base import Parallel

__all__ = ["Single"]


class Single(Parallel):
    """One model in one process, not wrapped."""

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
