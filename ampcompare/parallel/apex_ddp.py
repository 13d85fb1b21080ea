"""Apex's `DistributedDataParallel`, which legacy scripts use: the real one, or this package's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.parallel.base import Parallel
from ampcompare.parallel.syncbn import Convert, keep
from ampcompare.tensors.reduction import reduction_type

__all__ = ["ApexDDP"]

BYTES_OF_ELEMENT = 4  # as torch's DDP counts fp32 gradients


class ApexDDP(Parallel):
    """`apex.parallel.DistributedDataParallel`.

    Args:
        wrapper: the class.
        convert: what replaces batch norms.
        bucket_cap_mb: MiB of fp32 gradients reduced together, passed on as `message_size`; None means Apex's default.
        delay_allreduce: reduce once, at the end of the backward pass.
    """

    def __init__(
        self,
        wrapper: Callable[..., nn.Module],
        *,
        convert: Convert = keep,
        bucket_cap_mb: float | None = None,
        delay_allreduce: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._convert = convert
        self._options: dict[str, Any] = {"delay_allreduce": delay_allreduce}
        if bucket_cap_mb is not None:
            self._options["message_size"] = max(1, int(bucket_cap_mb * 2**20 / BYTES_OF_ELEMENT))

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return self._convert(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        if reduction_type(model) is not None:
            raise UnsupportedCombination(
                "reduce= chooses the type in which torch's DistributedDataParallel averages gradients, but this run "
                "uses Apex's; use --parallel ddp, or leave reduce out"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Apex announces its own deprecation
            return self._wrapper(model, **self._options)

    @contextmanager
    def no_sync(self, models: Sequence[Any]) -> Iterator[None]:
        """Keep gradients local; reduction is on again before the next forward pass, as Apex needs it."""
        for model in models:
            model.disable_allreduce()
        try:
            yield
        finally:
            for model in models:
                model.enable_allreduce()
