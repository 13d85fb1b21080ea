"""Reduce the gradients of a module as they arrive: one round for each backward pass.

A round opens with the first gradient and closes when the autograd engine calls back at the end of the pass. The first
round records the order of arrival and reduces at its end; later ones reduce a bucket as soon as it is full and next in
order, so that every rank issues its collectives in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._buckets import Bucket, Reduction
from ._errors import GradientNotPlanned, GradientReductionError, NoForwardPass
from ._plan import agree, plan_by_arrival, plan_by_type
from ._replicas import message_device

__all__ = ["Options", "Synchronizer"]

LEGACY_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})

Lane = tuple["dist.ProcessGroup | None", "torch.cuda.Stream | None"]


@dataclass(frozen=True)
class Options:
    """The user's options; `strict` adds Apex's limits."""

    message_size: int
    delay: bool
    triggers: frozenset[int]
    streams: int
    communicators: tuple[Sequence[Any], Sequence[Any]] | None
    group: dist.ProcessGroup | None
    reduction: Reduction
    prof: bool
    strict: bool


def facts(module: nn.Module) -> list[tuple[int, bool, torch.dtype, torch.device]]:
    """Return what makes buckets obsolete when it changes."""
    # `module.parameters()` takes several times as long, at each forward pass.
    result = []
    left: list[nn.Module | None] = [module]
    while left:
        current = left.pop()
        if current is not None:
            left.extend(current._modules.values())
            for param in current._parameters.values():
                if param is not None:
                    result.append((id(param), param.requires_grad, param.dtype, param.device))
    return result


class Synchronizer:
    """The hooks on the parameters of `module`, the buckets, and the state of the current round.

    The hooks do not keep it alive: without its owner they do nothing.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.options = options
        self.enabled = True
        self.facts = facts(module)
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        self.active = [
            i
            for i, param in enumerate(self.params)
            if param.requires_grad and (param.dtype in LEGACY_DTYPES or not options.strict)
        ]
        self.buckets: list[Bucket] | None = None
        self.retained: list[Tensor | None] = []
        self._delayed = options.delay
        self._bucket_of: dict[int, Bucket] = {}
        self._lanes: list[Lane] = []
        self._works: list[tuple[Bucket, Any]] = []
        self._arrivals: list[int] = []
        self._came = bytearray()
        self._next = 0
        self._open = False
        self._awaits_callback = False
        self._forward: Literal["missing", "done", "used"] = "missing"
        self._reference = weakref.ref(self)
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(i))
            for i, param in enumerate(self.params)
            if param.requires_grad
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        reference = self._reference

        def on_grad(_: Tensor) -> None:
            synchronizer = reference()
            if synchronizer is not None and synchronizer.enabled:
                synchronizer._on_grad(index)

        return on_grad

    def begin_forward(self) -> bool:
        """Record a forward pass, and return whether it is inside a running round (a checkpoint recomputes it)."""
        if torch._C._current_graph_task_id() != -1:
            return self._open
        # An exception ended the last backward pass before the engine called back.
        self._drain()
        self._open = self._awaits_callback = False
        self._forward = "done"
        return False

    def watch(self, output: Tensor) -> None:
        """Close the round with the pass in which `output` gets its gradient.

        That is the outermost pass: the parameters inside a reentrant checkpoint get theirs in a pass within it.
        """
        reference = self._reference

        def on_grad(_: Tensor) -> None:
            synchronizer = reference()
            if synchronizer is not None and synchronizer.enabled:
                synchronizer._await_callback()

        output.register_hook(on_grad)

    def _await_callback(self) -> None:
        if not self._awaits_callback:
            self._awaits_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _drain(self) -> list[Bucket]:
        """Wait for what was sent, and return its buckets."""
        works, self._works = self._works, []
        for bucket, work in works:
            if work is not None:
                work.wait()
                bucket.scatter()
        return [bucket for bucket, _ in works]

    def _on_grad(self, index: int) -> None:
        if self.options.strict and not self._legacy_accepts(index):
            return
        if not self._open:
            self._begin()
        if self.buckets is None or self._delayed:
            self._arrivals.append(index)
            return
        bucket = self._bucket_of[index]
        if self._came[index]:
            if bucket.pending == 0:
                raise GradientReductionError(
                    f"Parameter {self.names[index]} got a second gradient in one backward pass, after the first was "
                    "reduced: several reentrant checkpoints use it. Pass delay_allreduce=True to "
                    "DistributedDataParallel, or use_reentrant=False to the checkpoints."
                )
            return
        self._came[index] = 1
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch_full()

    def _legacy_accepts(self, index: int) -> bool:
        """Return whether Apex would reduce this gradient; raise where Apex raises."""
        if self._forward == "missing":
            raise NoForwardPass(
                "Backward through the module without a forward pass of DistributedDataParallel ('needs_refresh' is not "
                "set). Call the wrapper, not its module."
            )
        is_legacy_dtype = self.params[index].dtype in LEGACY_DTYPES
        if self._delayed:
            return is_legacy_dtype and self._forward == "done"
        if self._forward == "used":
            raise GradientReductionError(
                "A second backward pass for one forward pass: its buckets are already reduced. Call the wrapper again, "
                "or disable_allreduce() for all but the last pass."
            )
        if not is_legacy_dtype or (self.buckets is not None and index not in self._bucket_of):
            raise GradientNotPlanned(
                f"No bucket expects the gradient of parameter {self.names[index]} ({self.params[index].dtype}): either "
                "it had none in the first backward pass, or its dtype is not one of half, float and double."
            )
        return True

    def _begin(self) -> None:
        self._await_callback()
        self._open = True
        self._next = 0
        self._arrivals = []
        self._came = bytearray(len(self.params))
        for bucket in self.buckets or ():
            bucket.pending = len(bucket.params)
        if not self._lanes:
            self._lanes = self._make_lanes()

    def _make_lanes(self) -> list[Lane]:
        """Return the (process group, side stream) pairs that take buckets in turn; with several, a collective call."""
        options = self.options
        cuda = any(param.is_cuda for param in self.params)
        if options.communicators is not None:
            groups, streams = options.communicators
            return list(zip(groups, streams if cuda else [None] * len(groups), strict=True))
        ranks = None if options.group is None else dist.get_process_group_ranks(options.group)
        return [
            (
                dist.new_group(ranks) if options.streams > 1 else options.group,
                torch.cuda.Stream() if cuda else None,
            )
            for _ in range(options.streams)
        ]

    def _range(self, name: str) -> AbstractContextManager[Any]:
        if not self.options.prof:
            return nullcontext()
        if torch.cuda.is_available():
            return torch.cuda.nvtx.range(name)
        return torch.profiler.record_function(name)

    def _launch_full(self) -> None:
        assert self.buckets is not None
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._launch()

    def _launch(self) -> None:
        """Reduce the next bucket, without waiting for the result."""
        assert self.buckets is not None
        bucket = self.buckets[self._next]
        group, stream = self._lanes[self._next % len(self._lanes)]
        self._next += 1
        with self._range(f"apex ddp: reduce {bucket.size} elements"):
            flat = bucket.reserve()
            if stream is None or not flat.is_cuda:
                bucket.fill()
                self._works.append((bucket, dist.all_reduce(flat, group=group, async_op=True)))
                return
            stream.wait_stream(torch.cuda.current_stream(flat.device))
            with torch.cuda.stream(stream):
                bucket.fill()
                dist.all_reduce(flat, group=group)
                bucket.scatter()
            self._works.append((bucket, None))

    def _finish(self) -> None:
        """Close the round: plan the buckets if there are none, reduce what is left, and hand the gradients back."""
        self._awaits_callback = False
        if not self._open:
            return
        self._open = False
        self._forward = "used"
        with self._range("apex ddp: end of backward"):
            overlapped = self.buckets is not None and not self._delayed
            buckets = self.buckets = self.buckets or self._plan()
            if overlapped and self.options.strict and self._next < len(buckets):
                self._drain()
                raise GradientReductionError(
                    f"Only {self._next} of {len(buckets)} buckets were reduced: parameters that had a gradient in the "
                    "first backward pass have none now. Pass delay_allreduce=True."
                )
            while self._next < len(buckets):
                self._launch()
            done = self._drain()
            for _, stream in self._lanes:
                if stream is not None:
                    torch.cuda.current_stream(stream.device).wait_stream(stream)
            for bucket in done:
                bucket.adopt()
            if self.options.reduction.retain:
                self.retained = [bucket.reduced for bucket in done]

    def _plan(self) -> list[Bucket]:
        options = self.options
        if options.delay:
            plan = plan_by_type(self.params, self.active)
        else:
            local = plan_by_arrival(
                self.params,
                self.active,
                self._arrivals,
                message_size=options.message_size,
                triggers=options.triggers,
                complete=not options.strict,
            )
            device = message_device(options.group)
            plan = agree(local, self.active, len(self.params), device, options.group, complete=not options.strict)
        self._delayed = plan.delayed
        buckets = [Bucket([self.params[i] for i in indices], options.reduction) for indices in plan.buckets]
        self._bucket_of = {i: buckets[place] for place, indices in enumerate(plan.buckets) for i in indices}
        return buckets
