"""One process, one replica: nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ampcompare.parallel.base import Parallel

__all__ = ["Single"]


class Single(Parallel):
    """A model that stands alone."""

    def __init__(self) -> None:
        self._null: AbstractContextManager[None] = nullcontext()

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, models: Sequence[nn.Module], *, enabled: bool) -> AbstractContextManager[None]:
        return self._null
