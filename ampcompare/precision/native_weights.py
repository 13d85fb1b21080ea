"""torch.autocast over bfloat16 weights: casts by function as for `native`, memory as for `half`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ampcompare.precision.half_cast import cast_weights
from ampcompare.precision.half_optimizer import HalfOptimizer
from ampcompare.precision.keep_fp32 import kept_in_fp32, without_autocast

__all__ = ["NativeWeights"]


class NativeWeights(HalfOptimizer):
    """`torch.autocast` in bfloat16 over weights that are stored in it, except those of batch norm.

    Args:
        device: the device type to autocast for, with or without an index.
        options: those of `HalfOptimizer`.
    """

    key = "scaler"

    def __init__(self, *, device: str = "cpu", **options: Any) -> None:
        super().__init__(dtype="bfloat16", bn_fp32=True, **options)
        self.device_type = torch.device(device).type

    def _cast(self, models: Sequence[nn.Module]) -> None:
        with kept_in_fp32(models, self.keep_fp32, None, without_autocast(self.device_type)) as self.kept_fp32:
            for model in models:
                cast_weights(model, self.half_dtype, bn_fp32=self.bn_fp32)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, dtype=self.half_dtype)
