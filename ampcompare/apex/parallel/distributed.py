"""`DistributedDataParallel`: average gradients over processes, in buckets, while the backward pass still runs.

Source: Apex 25.05, `apex.parallel.DistributedDataParallel`; what differs is in `docs/deviations.md`.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.apex import deprecated_warning
from ampcompare.apex.apex_C import flatten as flatten
from ampcompare.apex.apex_C import unflatten as unflatten
from ampcompare.base.errors import ConfigError, PreparationError
from ampcompare.base.tensors.tree import tensors_in_value

from ._synchronizer import (
    BucketReduction,
    GradientBucket,
    GradientSynchronizer,
    ParallelPreparationError,
    broadcast_from_first,
    check_equal_models,
    flat_dist_call,
    model_key_of_buckets,
    plan_buckets_by_type,
    require_process_group,
)

DEFAULT_MESSAGE_SIZE = 10_000_000
# Sending costs more per element without a GPU, and less per message: earlier messages overlap more.
HOST_MESSAGE_SIZE = 250_000
TORCH_ONLY = {
    *("broadcast_buffers", "bucket_cap_mb", "check_reduction", "device_ids", "dim", "find_unused_parameters"),
    *("gradient_as_bucket_view", "init_sync", "output_device", "static_graph"),
}


class ParallelOptionError(ConfigError, ValueError):
    """An option that Apex has removed."""


class DistributedDataParallel(nn.Module):
    """Average the gradients of `module` over all ranks at each backward pass.

    The first backward pass records the order in which gradients arrive and reduces at its end; rank 0's order then
    makes the buckets of every rank, and later passes reduce a bucket as soon as all its gradients are there. Any
    floating dtype and any device is reduced as long as the backend can sum it. `param.grad` is reduced as it is:
    gradients accumulated under `disable_allreduce()` or `no_sync()` are reduced by the next pass outside it.

    Other arguments than these are those of Apex, and change no number.

    Args:
        module: the model, with equal parameters (names, shapes, dtypes) on all ranks; rank 0's values are broadcast,
            its buffers too.
        message_size: number of elements from which on a bucket is closed; the default means 250,000 without a GPU.
        delay_allreduce: reduce everything at the end of the backward pass.
        retain_allreduce_buffers: keep the reduced flat buffers in `allreduce_buffers`; gradients become views of them.
        allreduce_always_fp32: sum half and bfloat16 gradients in fp32.
        gradient_average: divide by the number of ranks; else gradients are summed.
        gradient_predivide_factor: divide by it before the sum; with `gradient_average` the rest follows after it.
        process_group: ranks to work with; None means all.
        torch_options: arguments of torch's class that scripts pass by mistake; one warning names them.

    Raises:
        ParallelOptionError: `shared_param` (a `ValueError`).
        ParallelPreparationError: other models on other ranks; parameters that are not on a GPU under NCCL.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int | Sequence[Any] = DEFAULT_MESSAGE_SIZE,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__()
        deprecated_warning(
            "apex.parallel.DistributedDataParallel is deprecated and was removed from Apex in May 2025; use "
            "torch.nn.parallel.DistributedDataParallel."
        )
        if isinstance(message_size, Sequence):
            # The second positional argument of torch's class.
            torch_options["device_ids"] = message_size
            message_size = DEFAULT_MESSAGE_SIZE
        if shared_param is not None:
            raise ParallelOptionError(
                "shared_param is no longer supported: leave it out. Where parameters are shared in ways that "
                "overlapping cannot follow, pass delay_allreduce=True."
            )
        require_process_group("DistributedDataParallel")
        _refuse_unknown_and_warn_of_options(torch_options, process_group)

        self.module = module
        self.world_size = dist.get_world_size(process_group)
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self._process_group = process_group

        if dist.get_backend(process_group) == "nccl":
            _check_module_on_gpu(module)
        check_equal_models(module, process_group)
        broadcast_from_first([*module.parameters(), *module.buffers()], process_group)
        self._synchronizer = self._make_synchronizer()

    def _make_synchronizer(self) -> GradientSynchronizer:
        predivide = self.gradient_predivide_factor
        message_size = int(self.message_size)
        if message_size == DEFAULT_MESSAGE_SIZE and not any(
            param.is_cuda for param in self.module.parameters()
        ):
            message_size = HOST_MESSAGE_SIZE
        reduction = BucketReduction(
            before=1.0 / predivide,
            after=predivide / self.world_size if self.gradient_average else 1.0,
            always_fp32=self.allreduce_always_fp32,
            retain=self.retain_allreduce_buffers,
        )
        group, delay = self._process_group, self.delay_allreduce
        return GradientSynchronizer(self.module, reduction, group, message_size=message_size, delay=delay)

    @property
    def needs_refresh(self) -> bool:
        """Whether the next backward pass records the order of gradients again."""
        return self._synchronizer.buckets is None

    @property
    def allreduce_buffers(self) -> list[Tensor | None]:
        """The flat reduced gradients of the last backward pass, with `retain_allreduce_buffers`; else empty."""
        return self._synchronizer.retained

    @property
    def _disable_allreduce(self) -> bool:
        """Whether gradients stay local; scripts set it where others call `disable_allreduce`."""
        return not self._synchronizer.enabled

    @_disable_allreduce.setter
    def _disable_allreduce(self, value: bool) -> None:
        self._synchronizer.enabled = not value

    @property
    def active_params(self) -> list[nn.Parameter]:
        """The parameters that take part in the reduction, in the order of the module."""
        return [param for param in self.module.parameters() if param.requires_grad]

    def disable_allreduce(self) -> None:
        """Keep gradients local until `enable_allreduce`."""
        self._disable_allreduce = True

    def enable_allreduce(self) -> None:
        """Reduce gradients again, from the next backward pass on."""
        self._disable_allreduce = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local inside the block, as in torch's class."""
        before = self._synchronizer.enabled
        self._synchronizer.enabled = False
        try:
            yield
        finally:
            self._synchronizer.enabled = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        result = self.module(*inputs, **kwargs)
        if not self._synchronizer.enabled or not torch.is_grad_enabled():
            return result
        if (
            not self._synchronizer.begin_forward_and_is_inside_round()
            and self._synchronizer.bucket_key != model_key_of_buckets(self.module)
        ):
            self._synchronizer.close()
            self._synchronizer = self._make_synchronizer()
            self._synchronizer.begin_forward_and_is_inside_round()
        for output in tensors_in_value(result):
            if output.requires_grad:
                self._synchronizer.end_round_behind(output)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the module and the options; a copy creates its own buckets and hooks."""
        if self._process_group is not None:
            raise PreparationError(
                "A DistributedDataParallel that was given a process group cannot be copied or pickled, because groups "
                "cannot. Copy its module."
            )
        return {name: value for name, value in self.__dict__.items() if name != "_synchronizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._synchronizer = self._make_synchronizer()


def _refuse_unknown_and_warn_of_options(options: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    unknown = sorted(set(options) - TORCH_ONLY)
    if unknown:
        raise TypeError(f"DistributedDataParallel got unexpected keyword arguments: {', '.join(unknown)}")
    if options and dist.get_rank(group) == 0:
        warnings.warn(
            f"{', '.join(sorted(options))}: for torch.nn.parallel.DistributedDataParallel, without effect in "
            "apex.parallel.DistributedDataParallel, which works on the device of the module, allows unused parameters, "
            "and broadcasts buffers once, when it is made",
            stacklevel=3,
        )


def _check_module_on_gpu(module: nn.Module) -> None:
    elsewhere = [name for name, param in module.named_parameters() if not param.is_cuda]
    if elsewhere:
        raise ParallelPreparationError(
            f"NCCL reduces CUDA tensors only; {len(elsewhere)} parameters are not on a GPU (first: {elsewhere[0]}). "
            "Call model.cuda() before DistributedDataParallel, or use the gloo backend."
        )


def _tensors_nested_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors_nested_in(value)


class Reducer:
    """Average the gradients of a module, or tensors in nested lists, over all ranks at each call of `reduce`.

    The parameters of a module are broadcast from rank 0 at first. Source: Apex 25.05, `apex.parallel.Reducer`.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_process_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            broadcast_from_first(self.module.parameters(), None)
        else:
            self.grads = list(_tensors_nested_in(module_or_grads_list))

    def reduce(self) -> None:
        """Average over all ranks, flattened by dtype; a collective call.

        A parameter with a gradient on some ranks only gets the average everywhere, in which the others count as zero.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        params = [
            param for param in self.module.parameters() if param.requires_grad or param.grad is not None
        ]
        reduction = BucketReduction(after=1.0 / dist.get_world_size())
        for indices in plan_buckets_by_type(params, range(len(params))).buckets:
            bucket = GradientBucket([params[i] for i in indices], reduction)
            flat = bucket.reserve_buffer()
            bucket.fill_from_gradients()
            dist.all_reduce(flat)
            bucket.write_reduced_gradients()
            bucket.set_missing_gradients()
