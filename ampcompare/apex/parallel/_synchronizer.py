"""Reduce the gradients of a module as they arrive: one round for each backward pass.

A round opens with the first gradient and closes when the autograd engine calls back at the end of the pass. The first
round records the order of arrival and reduces at its end; later ones reduce a bucket as soon as it is full and next in
order, so that every rank issues its collectives in the same order.
"""

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.base.errors import PreparationError
from ampcompare.base.tensors.lists import flatten, group_tensors_by_type, is_dense, unflatten

_TYPE_ORDER = (torch.float16, torch.float32, torch.float64)


class ParallelPreparationError(PreparationError, AssertionError):
    """A model that cannot be wrapped as it is."""


class ProcessGroupMissing(PreparationError, RuntimeError, ValueError):
    """No process group exists yet; torch raises a `ValueError` for it."""


class GradientReductionError(PreparationError, RuntimeError):
    """Gradients that cannot be reduced, or came where the bucket structure has no place for them."""


@dataclass(frozen=True)
class BucketReduction:
    """How a bucket is summed: the factors before and after, at least in fp32 or not, and whether it is kept."""

    before: float = 1.0
    after: float = 1.0
    always_fp32: bool = False
    retain: bool = False


def _views_per_parameter(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return views into `flat`, one per parameter, with its shape and where possible its memory format."""
    views, offset = [], 0
    for param in params:
        piece = flat[offset : offset + param.numel()]
        offset += param.numel()
        # foreach kernels are fast only where source and destination have equal strides.
        views.append(
            piece.as_strided(param.size(), param.stride()) if is_dense(param) else piece.view(param.shape)
        )
    return views


class GradientBucket:
    """Parameters whose gradients travel together, and the flat buffer in which they do.

    The buffer ends in one number per parameter: how many ranks had a gradient for it. So ranks may use different
    parameters: a rank without one sends zeros, and receives the reduced gradient if any rank had one, else none.

    Call in this order: `reserve_buffer`, `fill_from_gradients`, sum `flat` over the ranks, `write_reduced_gradients`,
    `set_missing_gradients`.
    """

    def __init__(self, params: Sequence[nn.Parameter], reduction: BucketReduction) -> None:
        self.params = list(params)
        self.size = sum(param.numel() for param in params)
        self.dtype = self.params[0].dtype
        self.pending = len(self.params)
        self.flat: Tensor | None = None
        self._reduction = reduction
        self._wire_views: list[Tensor] = []
        self._grads: list[Tensor | None] = []
        self.reduced: Tensor | None = None

    def reserve_buffer(self) -> Tensor:
        """Return the buffer, allocated on the stream that will use the gradients later."""
        if self.flat is not None and not self._reduction.retain:
            return self.flat
        wire = torch.promote_types(self.dtype, torch.float32) if self._reduction.always_fp32 else self.dtype
        # Gradients become views of a retained buffer, so that each pass needs its own.
        self.flat = torch.empty(self.size + len(self.params), dtype=wire, device=self.params[0].device)
        self._wire_views = _views_per_parameter(self.flat, self.params)
        if self._reduction.retain:
            body = self.flat[: self.size]
            self.reduced = body if wire is self.dtype else torch.empty_like(body, dtype=self.dtype)
        return self.flat

    @torch.no_grad()
    def fill_from_gradients(self) -> None:
        """Copy the current gradients into the buffer, and apply the factor before the sum."""
        assert self.flat is not None
        self._grads = grads = [param.grad for param in self.params]
        present = [grad for grad in grads if grad is not None]
        if any(grad.layout is not torch.strided for grad in present):
            raise GradientReductionError(
                f"A gradient has the layout {next(g.layout for g in present if g.layout is not torch.strided)}; Apex's "
                "DistributedDataParallel reduces dense gradients only. Build the embedding with sparse=False, or use "
                "torch.nn.parallel.DistributedDataParallel."
            )
        if len(present) == len(grads):
            torch._foreach_copy_(self._wire_views, present)
            self.flat[self.size :].fill_(1)
        else:
            used = torch.tensor([grad is not None for grad in grads])
            self.flat.zero_()
            self.flat[self.size :].copy_(used)
            if present:
                torch._foreach_copy_(
                    [view for view, grad in zip(self._wire_views, grads, strict=True) if grad is not None],
                    present,
                )
        if self._reduction.before != 1:
            self.flat[: self.size].mul_(self._reduction.before)

    @torch.no_grad()
    def write_reduced_gradients(self) -> None:
        """Apply the factor after the sum and give each gradient its reduced values."""
        assert self.flat is not None
        body = self.flat[: self.size]
        if self._reduction.after != 1:
            body.mul_(self._reduction.after)
        if self.reduced is None:
            pairs = [(g, v) for g, v in zip(self._grads, self._wire_views, strict=True) if g is not None]
            if pairs:
                torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])
        elif self.reduced.dtype is not body.dtype:
            self.reduced.copy_(body)

    @torch.no_grad()
    def set_missing_gradients(self) -> None:
        """Set what `scatter` could not copy into: retained views, and gradients that only other ranks had."""
        assert self.flat is not None
        absent = any(grad is None for grad in self._grads)
        # Read from the device only where this rank lacks something.
        users = self.flat[self.size :].tolist() if absent else []
        if self.reduced is not None:
            for i, view in enumerate(_views_per_parameter(self.reduced, self.params)):
                if self._grads[i] is not None or users[i] > 0:
                    self.params[i].grad = view
        elif absent:
            for i, view in enumerate(self._wire_views):
                if self._grads[i] is None and users[i] > 0:
                    self.params[i].grad = view.to(self.dtype, copy=True)
        self._grads = []


def model_key_of_buckets(module: nn.Module) -> list[tuple[int, bool, torch.dtype, torch.device]]:
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


class GradientSynchronizer:
    """The hooks on the parameters of `module`, the buckets, and the state of the current round.

    The hooks do not keep it alive: without its owner they do nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        reduction: BucketReduction,
        group: dist.ProcessGroup | None,
        *,
        message_size: int,
        delay: bool,
    ) -> None:
        self._reduction, self._group = reduction, group
        self._message_size, self._delay = message_size, delay
        self.enabled = True
        self.bucket_key = model_key_of_buckets(module)
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        self.active = [i for i, param in enumerate(self.params) if param.requires_grad]
        self.buckets: list[GradientBucket] | None = None
        self.retained: list[Tensor | None] = []
        self._delayed = delay
        self._bucket_of: dict[int, GradientBucket] = {}
        self._stream: torch.cuda.Stream | None = None
        self._works: list[tuple[GradientBucket, Any]] = []
        self._arrivals: list[int] = []
        self._came = bytearray()
        self._next = 0
        self._open = False
        self._awaits_callback = False
        self._reference = weakref.ref(self)
        self._handles = [
            self.params[i].register_post_accumulate_grad_hook(
                self._gradient_hook(partial(GradientSynchronizer._note_gradient, index=i))
            )
            for i in self.active
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _gradient_hook(self, react: "Callable[[GradientSynchronizer], None]") -> Callable[[Tensor], None]:
        reference = self._reference

        def on_grad(_: Tensor) -> None:
            synchronizer = reference()
            if synchronizer is not None and synchronizer.enabled:
                react(synchronizer)

        return on_grad

    def begin_forward_and_is_inside_round(self) -> bool:
        """Record a forward pass, and return whether it is inside a running round (a checkpoint recomputes it)."""
        if torch._C._current_graph_task_id() != -1:
            return self._open
        # An exception ended the last backward pass before the engine called back.
        self._wait_for_sent_buckets()
        self._open = self._awaits_callback = False
        return False

    def end_round_behind(self, output: Tensor) -> None:
        """Close the round with the pass in which `output` gets its gradient.

        That is the outermost pass: the parameters inside a reentrant checkpoint get theirs in a pass within it.
        """
        output.register_hook(self._gradient_hook(GradientSynchronizer._queue_finish_callback))

    def _queue_finish_callback(self) -> None:
        if not self._awaits_callback:
            self._awaits_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_round)

    def _wait_for_sent_buckets(self) -> list[GradientBucket]:
        """Wait for what was sent, and return its buckets."""
        works, self._works = self._works, []
        for bucket, work in works:
            if work is not None:
                work.wait()
                bucket.write_reduced_gradients()
        return [bucket for bucket, _ in works]

    def _note_gradient(self, index: int) -> None:
        if not self._open:
            self._begin_round()
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
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._reduce_next_bucket()

    def _begin_round(self) -> None:
        self._queue_finish_callback()
        self._open = True
        self._next = 0
        self._arrivals = []
        self._came = bytearray(len(self.params))
        for bucket in self.buckets or ():
            bucket.pending = len(bucket.params)
        if self._stream is None and any(param.is_cuda for param in self.params):
            self._stream = torch.cuda.Stream()

    def _reduce_next_bucket(self) -> None:
        """Reduce the next bucket, without waiting for the result."""
        assert self.buckets is not None
        bucket = self.buckets[self._next]
        group, stream = self._group, self._stream
        self._next += 1
        flat = bucket.reserve_buffer()
        if stream is None or not flat.is_cuda:
            bucket.fill_from_gradients()
            self._works.append((bucket, dist.all_reduce(flat, group=group, async_op=True)))
            return
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            bucket.fill_from_gradients()
            dist.all_reduce(flat, group=group)
            bucket.write_reduced_gradients()
        self._works.append((bucket, None))

    def _finish_round(self) -> None:
        """Close the round: plan the buckets if there are none, reduce what is left, and hand the gradients back."""
        self._awaits_callback = False
        if not self._open:
            return
        self._open = False
        buckets = self.buckets = self.buckets or self._plan_buckets()
        while self._next < len(buckets):
            self._reduce_next_bucket()
        done = self._wait_for_sent_buckets()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for bucket in done:
            bucket.set_missing_gradients()
        if self._reduction.retain:
            self.retained = [bucket.reduced for bucket in done]

    def _plan_buckets(self) -> list[GradientBucket]:
        if self._delay:
            plan = plan_buckets_by_type(self.params, self.active)
        else:
            local = _plan_buckets_by_arrival(self.params, self.active, self._arrivals, self._message_size)
            plan = _broadcast_bucket_plan(local, self.active, len(self.params), self._group)
        self._delayed = plan.delayed
        buckets = [
            GradientBucket([self.params[i] for i in indices], self._reduction) for indices in plan.buckets
        ]
        self._bucket_of = {i: buckets[place] for place, indices in enumerate(plan.buckets) for i in indices}
        return buckets


@dataclass(frozen=True)
class _BucketPlan:
    """Buckets as indices into the module's parameters, in the order in which they are reduced.

    `delayed`: no bucket may be reduced before the end of a backward pass.
    """

    buckets: tuple[tuple[int, ...], ...]
    delayed: bool = False


def _dtype_order_key(param: nn.Parameter) -> tuple[int, str, str]:
    """Order dtypes as Apex does: half, float, double, then those that Apex does not support."""
    rank = _TYPE_ORDER.index(param.dtype) if param.dtype in _TYPE_ORDER else len(_TYPE_ORDER)
    return rank, str(param.dtype), str(param.device)


def plan_buckets_by_type(params: Sequence[nn.Parameter], active: Iterable[int]) -> _BucketPlan:
    """Return one bucket for each dtype and device."""
    kinds: dict[tuple[int, str, str], list[int]] = {}
    for index in active:
        kinds.setdefault(_dtype_order_key(params[index]), []).append(index)
    return _BucketPlan(tuple(tuple(kinds[kind]) for kind in sorted(kinds)), delayed=True)


def _plan_buckets_by_arrival(
    params: Sequence[nn.Parameter], active: Sequence[int], arrivals: Sequence[int], message_size: int
) -> _BucketPlan:
    """Return the buckets that close, at `message_size` elements, as gradients arrive; at the end those that never came.

    An index that came twice (a weight used in two reentrant checkpoints) makes the plan delayed, since its first
    gradient is not its last.
    """
    if len(set(arrivals)) < len(arrivals):
        return plan_buckets_by_type(params, active)
    closed: list[tuple[int, ...]] = []
    running: dict[tuple[int, str, str], list[int]] = {}
    sizes: dict[tuple[int, str, str], int] = {}
    for index in arrivals:
        kind = _dtype_order_key(params[index])
        running.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + params[index].numel()
        if sizes[kind] >= message_size:
            closed.append(tuple(running.pop(kind)))
            sizes.pop(kind)
    closed += [tuple(running[kind]) for kind in sorted(running)]
    came = set(arrivals)
    closed += plan_buckets_by_type(params, [index for index in active if index not in came]).buckets
    return _BucketPlan(tuple(closed))


def _broadcast_bucket_plan(
    plan: _BucketPlan, active: Sequence[int], total: int, group: dist.ProcessGroup | None
) -> _BucketPlan:
    """Return rank 0's plan on every rank of `group`; a collective call. `total` is the number of parameters.

    Raises:
        GradientReductionError: rank 0 reduces other parameters than this rank can.
    """
    numbers = [int(plan.delayed)]
    for bucket_index, bucket in enumerate(plan.buckets):
        for index in bucket:
            numbers += [index, bucket_index]
    numbers += [-1] * (2 * total + 1 - len(numbers))
    message = torch.tensor(numbers, dtype=torch.int64, device=_message_device_of_group(group))
    dist.broadcast(message, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    delayed, *rest = message.tolist()
    buckets: dict[int, list[int]] = {}
    for index, bucket_index in zip(rest[::2], rest[1::2], strict=True):
        if index >= 0:
            buckets.setdefault(bucket_index, []).append(index)
    agreed = _BucketPlan(
        tuple(tuple(buckets[bucket_index]) for bucket_index in sorted(buckets)), bool(delayed)
    )
    different = set(active).symmetric_difference(index for bucket in agreed.buckets for index in bucket)
    if different:
        raise GradientReductionError(
            f"Rank {dist.get_rank(group)} and rank 0 train different parameters (numbers {sorted(different)[:10]} of "
            f"{total}). Set requires_grad alike on all ranks before the forward pass."
        )
    return agreed


def require_process_group(what: str) -> None:
    """Raise `ProcessGroupMissing` unless a default process group exists."""
    if not dist.is_initialized():
        raise ProcessGroupMissing(
            f"{what} needs a process group and there is none. Call torch.distributed.init_process_group first (for one "
            "CPU process: backend='gloo', init_method='tcp://127.0.0.1:29500', rank=0, world_size=1)."
        )


def _message_device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Return where small tensors must lie for the backend of `group`."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective of `torch.distributed` on `tensors` in place, flattened by dtype; all-reduce averages.

    Source: Apex 25.05, `apex.parallel.distributed`; training scripts import it.
    """
    for alike in group_tensors_by_type(tensors):
        flat = flatten(alike)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        torch._foreach_copy_(alike, list(unflatten(flat, alike)))


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensors` with those of the first rank of `group`."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for alike in group_tensors_by_type(tensor.detach() for tensor in tensors if tensor.numel()):
        flat = flatten(alike)
        # Bytes, because backends lack some dtypes (gloo: bool, fp8).
        dist.broadcast(flat.view(torch.uint8), src=source, group=group)
        torch._foreach_copy_(alike, list(unflatten(flat, alike)))


def check_equal_models(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise `ParallelPreparationError` on every rank if parameters differ in name, shape, dtype or `requires_grad`."""
    facts = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    elements = sum(p.numel() for p in module.parameters())
    local_digest = torch.tensor(
        [zlib.crc32(repr(facts).encode()), len(facts), elements], device=_message_device_of_group(group)
    )
    everybody = [torch.empty_like(local_digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, local_digest, group=group)
    reports = [report.tolist() for report in everybody]
    different = [rank for rank, report in enumerate(reports) if report != reports[0]]
    if different:
        rank = different[0]
        raise ParallelPreparationError(
            f"Rank(s) {different} hold another model than rank 0: {reports[rank][1]} parameters with "
            f"{reports[rank][2]} elements on rank {rank}, {reports[0][1]} with {reports[0][2]} on rank 0; names, "
            "shapes, dtypes and requires_grad must be equal. Build the same model on every rank."
        )
