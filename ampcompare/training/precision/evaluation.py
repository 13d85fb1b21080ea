"""A precision to evaluate trained weights in, whatever trained them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampcompare.training.precision.base import Precision
from ampcompare.training.precision.cpu_half import cpu_half
from ampcompare.training.precision.half_cast import cast_model

__all__ = ["EvaluationPrecision"]

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


class EvaluationPrecision(Precision):
    """Models that were built in fp32, cast to one type as a whole or run under autocast; nothing is trained.

    Outputs are cast to fp32, in which metrics are computed.

    Args:
        name: as `parse_eval_precisions` returns it.
        device: where the models are.
        choice: how a CPU computes 16-bit types, as for `cpu_half`.
        outside: the arm that trained in this process, whose patches of torch are suspended.

    Attributes:
        mode: how 16-bit arithmetic is computed, such as "fp16 emulated"; None without it.
    """

    def __init__(self, name: str, device: torch.device, *, choice: str = "auto", outside: Precision) -> None:
        under_autocast, _, type_name = name.rpartition(":")
        dtype = DTYPES[type_name]
        self._device, self._outside = device, outside
        self._cast = None if under_autocast else dtype
        self.half_dtype = None if dtype is torch.float64 else dtype
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if under_autocast:
            self._autocast = torch.autocast(device.type, dtype=dtype)
        self.mode, self._compute = cpu_half(choice, self.half_dtype, device)

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        if self._cast is not None:
            for model in models:
                cast_model(model, self._cast, bn_fp32=False)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return self._contexts()

    @contextmanager
    def _contexts(self) -> Iterator[None]:
        with self._outside.suspended(), self._compute, self._autocast:
            yield
