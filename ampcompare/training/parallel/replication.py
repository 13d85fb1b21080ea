"""How replicas of a model work together: a class for each kind of replication, batch norms, types of reduction."""

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.training.parallel.sharding import ShardTypes, is_sharded_model, shard_models

ATTRIBUTE = "_ampcompare_reduction_type"
BYTES_OF_ELEMENT = 4  # as torch's DDP counts fp32 gradients
Convert = Callable[[nn.Module], nn.Module]
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


def apex_parallel_module(engine: str | None) -> ModuleType:
    """Return the real `apex.parallel` if the arm runs on the real Apex, else ampcompare's own."""
    return importlib.import_module("apex.parallel" if engine == "nvidia" else "ampcompare.apex.parallel")


def find_batch_norm_converter(kind: str, device: torch.device, engine: str | None) -> Convert | None:
    """Return what replaces the batch norms of a model by "torch" or "apex"; None for "none"."""
    if kind == "none":
        return None
    if kind == "torch":
        if device.type == "cpu":
            raise UnsupportedCombination(
                "torch's SyncBatchNorm has no CPU kernels, but the device is cpu; use --sync-bn apex"
            )
        return nn.SyncBatchNorm.convert_sync_batchnorm

    def convert(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Apex announces its own deprecation
            converted: nn.Module = apex_parallel_module(engine).convert_syncbn_model(model)
        return converted

    return convert


class Parallel:
    """How replicas of a model work together. The defaults are one model in one process, not wrapped."""

    waits_in_forward: ClassVar[bool] = False
    """Whether a forward pass waits for other ranks, so that all of them must make equally many."""

    def __init__(self, *, convert: Convert | None = None) -> None:
        self._convert = convert

    def convert_batchnorm(self, model: nn.Module) -> nn.Module:
        """Return `model` with its batch norms synchronized over the replicas, if so configured."""
        return model if self._convert is None else self._convert(model)

    def shard(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Replace parameters, and the state that optimizers hold of them, by this rank's part, if so configured."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training; the last step of preparation, since wrappers record dtypes."""
        return model

    def no_sync(self, models: Sequence[Any]) -> AbstractContextManager[None]:
        """Return the context in which wrapped models exchange no gradients; one process exchanges none anyway."""
        return NO_CONTEXT


class SingleProcess(Parallel):
    """One model in one process, not wrapped."""


class DP(Parallel):
    """`torch.nn.DataParallel` over every visible GPU.

    An arm that replaces `forward` on the instance must give each replica its own `forward`, or all replicas run
    the first one's weights: this package's engine does, the real Apex does not.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model)


class DDP(Parallel):
    """`torch.nn.parallel.DistributedDataParallel`."""

    def __init__(
        self,
        device: torch.device,
        *,
        convert: Convert | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(convert=convert)
        self._options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
        if bucket_cap_mb is not None:
            self._options["bucket_cap_mb"] = bucket_cap_mb
        if device.type == "cuda":
            self._options["device_ids"] = [device]

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(model, **self._options)
        dtype = find_reduction_type(model)
        if dtype is not None:
            # torch compares annotations of a hook with types, and those of this package are text.
            wrapped.register_comm_hook(dtype, lambda dtype, bucket: reduce_bucket_in_dtype(dtype, bucket))
        return wrapped

    @contextmanager
    def no_sync(self, models: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(model.no_sync())
            yield


class ApexDDP(Parallel):
    """`apex.parallel.DistributedDataParallel`; `bucket_cap_mb` counts fp32 gradients, as its `message_size` does."""

    def __init__(
        self,
        wrapper: Callable[..., nn.Module],
        *,
        convert: Convert | None = None,
        bucket_cap_mb: float | None = None,
        delay_allreduce: bool = False,
    ) -> None:
        super().__init__(convert=convert)
        self._wrapper = wrapper
        self._options: dict[str, Any] = {"delay_allreduce": delay_allreduce}
        if bucket_cap_mb is not None:
            self._options["message_size"] = max(1, int(bucket_cap_mb * 2**20 / BYTES_OF_ELEMENT))

    def wrap(self, model: nn.Module) -> nn.Module:
        if find_reduction_type(model) is not None:
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


class FSDP(Parallel):
    """`torch.distributed.fsdp.fully_shard`. Weights that an arm has sharded itself stay as they are."""

    waits_in_forward = True

    def shard(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        whole = [model for model in models if not is_sharded_model(model)]
        if whole:
            shard_models(whole, optimizers, ShardTypes(reduce=find_reduction_type(whole[0])))

    @contextmanager
    def no_sync(self, models: Sequence[Any]) -> Iterator[None]:
        """Keep whole gradients on each rank; weights are gathered anyway."""
        for model in models:
            model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for model in models:
                model.set_requires_gradient_sync(True)


def request_reduction_type(model: nn.Module, dtype: torch.dtype) -> None:
    """Ask what wraps `model` for several processes to average its gradients in `dtype`."""
    setattr(model, ATTRIBUTE, dtype)


def find_reduction_type(model: nn.Module) -> torch.dtype | None:
    """Return the type that was asked for; None for that of each gradient."""
    found: torch.dtype | None = getattr(model, ATTRIBUTE, None)
    return found


def reduce_bucket_in_dtype(dtype: torch.dtype, bucket: Any) -> Any:
    """Average a bucket of `DistributedDataParallel` over all ranks; a communication hook with its state.

    Args:
        dtype: in which the gradients travel and are added.
        bucket: a `GradBucket`: one-dimensional, in the type of the gradients, which the result has too.

    Returns:
        A future of the averaged buffer.
    """
    buffer = bucket.buffer()
    # Divided before the sum, as DDP does it, so that a sum in fp16 does not overflow.
    moved = buffer.to(dtype) / distributed.get_world_size()
    future = distributed.all_reduce(moved, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def average_over_ranks_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
    """Average tensors over all ranks in `dtype`, in place; every rank passes tensors of the same shapes."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]) / distributed.get_world_size()
    distributed.all_reduce(flat)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
