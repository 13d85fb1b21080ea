"""Plain single precision: nothing is cast and nothing is scaled; on request in TF32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from ampcompare.base.tensors.tf32 import Tf32, require_tf32, set_tf32
from ampcompare.training.precision.base import NO_CONTEXT, Precision, Prepared

__all__ = ["FP32"]


class FP32(Precision):
    """The reference that the other backends are compared with: the defaults of `Precision`.

    Args:
        tf32: compute products and convolutions in TF32, from `prepare` on and in the whole process; else torch's
            switches stay as they are.

    Raises:
        BackendUnavailable: TF32 on a device without it.
    """

    def __init__(self, *, device: str = "cpu", tf32: bool = False) -> None:
        if tf32:
            require_tf32(torch.device(device), "fp32:tf32")
        self.tf32 = tf32
        self._switches = Tf32.read()

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        if self.tf32:
            set_tf32(True)
        return list(models), list(optimizers)

    def suspended(self) -> AbstractContextManager[None]:
        return self._switches.applied() if self.tf32 else NO_CONTEXT

    def unrecordable(self, optimizers: Sequence[Optimizer]) -> None:
        return None
