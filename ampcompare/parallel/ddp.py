"""torch's `DistributedDataParallel`: one replica per process, gradients averaged while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ampcompare.parallel.base import Parallel
from ampcompare.parallel.syncbn import Convert, keep
from ampcompare.tensors.reduction import reduce_buckets_in, reduction_type

__all__ = ["DDP"]


class DDP(Parallel):
    """`torch.nn.parallel.DistributedDataParallel`.

    Args:
        device: of this process.
        convert: what replaces batch norms.
        bucket_cap_mb: MiB of gradients reduced together; None means torch's default.
        find_unused_parameters: some parameters may get no gradient.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        convert: Convert = keep,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._convert = convert
        self._options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
        if bucket_cap_mb is not None:
            self._options["bucket_cap_mb"] = bucket_cap_mb
        if device.type == "cuda":
            self._options["device_ids"] = [device]

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        return self._convert(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(model, **self._options)
        dtype = reduction_type(model)
        if dtype is not None:
            # torch compares annotations of a hook with types, and those of this package are text.
            wrapped.register_comm_hook(dtype, lambda dtype, bucket: reduce_buckets_in(dtype, bucket))
        return wrapped

    @contextmanager
    def no_sync(self, models: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(model.no_sync())
            yield
