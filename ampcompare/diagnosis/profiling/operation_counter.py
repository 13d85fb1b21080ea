"""One step, operation by operation: FLOPs, bytes, casts, host reads and products by layer.

Times are not taken here. The mode is entered last, so that an emulation of 16 bits on a CPU runs beneath it and is not
counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampcompare.base.tensors.products import (
    OperationMode,
    narrowest_type_name,
    product_flops,
    type_name_in_reports,
)
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.diagnosis.profiling.marks import PhaseFollower
from ampcompare.diagnosis.profiling.trace import has_at_most_16_bits
from ampcompare.diagnosis.sites import PACKAGE, location_text_of_frame, nearest_user_location_text

aten = torch.ops.aten
OVERFLOW_CHECKS = tuple(
    os.path.join(PACKAGE, *room.split("/"), "")
    for room in ("apex", "training/precision", "script", "base/tensors")
)
SCALER = os.path.join("torch", "amp", "grad_scaler.py")
CASTS = (aten._to_copy.default,)
TO_HOST = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__})
READ_OF_NUMBER = "_local_scalar_dense"  # what `item` runs
COMPUTING = ("forward", "backward", "unscale")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def bytes_of_tensor(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class ForwardProduct:
    """A product of the forward pass."""

    module: str
    operation: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]  # that tensor cores see, by name


@dataclass
class OperationCounts:
    """What was counted in some steps; all but host reads are of the first."""

    steps: int = 0
    flops: int = 0
    bytes: int = 0
    cast_bytes: int = 0
    products: Counter[ForwardProduct] = field(default_factory=Counter)
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)  # host reads by line and sort
    sync_steps: Counter[tuple[str, str]] = field(default_factory=Counter)  # the steps that have any
    casts: dict[tuple[int, int, str], list[tuple[str, str, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    keep: list[Any] = field(default_factory=list)  # storages whose address must not be used again meanwhile
    optimizer_operations: int = 0


class OperationCounter(OperationMode):
    """Counts the operations of a step, and host reads of the steps after it."""

    def __init__(self, marks: PhaseFollower, device: torch.device) -> None:
        super().__init__()
        self.marks = marks
        self.device = device
        self.counts = OperationCounts()
        self._reads: Counter[tuple[str, str]] = Counter()  # of the present step
        self._computed: set[int] = set()  # addresses of storages that the model's work has filled
        self._calls = _HostReadWatch(self)

    def __enter__(self) -> OperationCounter:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        self.counts.syncs.update(self._reads)
        self.counts.sync_steps.update(self._reads.keys())
        self.counts.steps += 1
        self._reads.clear()

    def count_read_by_host(self, tensor: Tensor) -> None:
        """Count that a tensor is asked for by the host: on a CPU no operation tells, as it is there already.

        A result counts once, and a batch does not: on a GPU it may be asked for before it is brought to the device.
        """
        address = _storage_address(tensor)
        if self.device.type == "cpu" and address in self._computed:
            self._computed.discard(address)
            self._reads[self._reading_line_and_value("copy to the host")] += 1

    def count_tensor_print(self) -> None:
        self._reads[self._reading_line_and_value("print")] += 1

    def see_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        counts, marks = self.counts, self.marks
        name = func._schema.name.rpartition("::")[2]
        if func.is_view or name in ALLOCATIONS or name == "detach":
            return
        inputs = [*tensors_in_value(args), *tensors_in_value(kwargs)]
        outputs = list(tensors_in_value(result))
        if self.device.type == "cpu":
            note = self._computed.update if marks.phase in COMPUTING else self._computed.difference_update
            note(map(_storage_address, outputs))
        if what := self._why_host_waits(name, inputs, outputs):
            self._reads[self._reading_line_and_value(what)] += 1
        if counts.steps or name == READ_OF_NUMBER:
            return
        if marks.phase == "optimizer":
            counts.optimizer_operations += 1
        moved = sum(map(bytes_of_tensor, inputs)) + sum(map(bytes_of_tensor, outputs))
        counts.bytes += moved
        if func in CASTS and inputs and outputs and inputs[0].dtype != outputs[0].dtype:
            self._count_repeated_cast(inputs[0], outputs[0], moved)
            return
        flops = product_flops(func, args, kwargs, result) or 0
        counts.flops += flops
        sizes = _product_sizes(name, args, outputs) if marks.phase == "forward" and flops else ()
        if sizes:
            counts.products[
                ForwardProduct(marks.running_module, name, narrowest_type_name(inputs), sizes)
            ] += flops

    def _why_host_waits(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
        """Return how an operation makes the host wait for a value; "" if it does not."""
        if name == READ_OF_NUMBER:
            # An optimizer keeps its number of steps on the host, and what the host holds is not waited for.
            is_on_host = inputs[0].device.type == "cpu" and self.device.type != "cpu"
            return "" if self.marks.phase == "optimizer" or is_on_host else "item"
        if all(one.device.type == "cpu" for one in inputs):
            return ""
        if name == "nonzero":
            return name
        is_copy = name in ("_to_copy", "copy_") and bool(outputs) and outputs[0].device.type == "cpu"
        return "copy to the host" if is_copy else ""

    def _count_repeated_cast(self, source: Tensor, result: Tensor, moved: int) -> None:
        counts = self.counts
        if not (source.dtype.is_floating_point and result.dtype.is_floating_point):
            return
        counts.cast_bytes += moved
        storage = source.untyped_storage()
        counts.keep.append(storage)
        key = (storage.data_ptr(), source._version, type_name_in_reports(result))
        counts.casts[key].append(
            (nearest_user_location_text(sys._getframe(2)), self.marks.running_module, moved)
        )

    def _reading_line_and_value(self, what: str) -> tuple[str, str]:
        """Return the line that reads a value, and what it is: a gradient scaler reads whether there was an overflow."""
        frame: FrameType | None = sys._getframe(3)  # past the mode that has seen it
        while frame is not None:
            if line := location_text_of_frame(frame):
                return line, what
            name = frame.f_code.co_filename
            if name.endswith(SCALER) or name.startswith(OVERFLOW_CHECKS):
                return "", "overflow check"
            frame = frame.f_back
        return "", what


class _HostReadWatch(TorchFunctionMode):
    """Tells a counter which tensors the host asks for."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in TO_HOST:
            self._counter.count_read_by_host(args[0])
        return result


def _product_sizes(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[str, int], ...]:
    """Return the sizes of a product that tensor cores see; none for other operations."""
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
        return ("rows", left.shape[-2]), ("in", left.shape[-1]), ("out", right.shape[-1])
    # depthwise: no product of matrices
    if name == "convolution" and not (args[8] > 1 and args[1].shape[1] <= 4):
        return ("in channels", args[0].shape[1]), ("out channels", outputs[0].shape[1])
    return ()


def _storage_address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage of their own
        return 0


def sizes_unfit_for_tensor_cores(shape: ForwardProduct) -> list[str]:
    """Return the sizes of a product that are no multiples of 8 and keep a GPU from its tensor cores, or slow it there.

    These are the sizes that are contiguous in memory: not the rows of a batch. The channels of an image at the input of
    a network are left out too, as kernels pad these.
    """
    if not has_at_most_16_bits(shape.dtype):
        return []
    missed: list[str] = []
    for name, size in shape.sizes:
        is_padded = name == "in channels" and size <= 4
        if size % 8 and size > 1 and name != "rows" and not is_padded:
            missed.append(f"{name} {size}")
    return missed


def repeated_casts_by_line(counts: OperationCounts) -> list[tuple[str, str, int, int]]:
    """Return line, module, number and bytes of the tensors that were cast to one type again, the largest first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for calls in counts.casts.values():
        if len(calls) < 2:
            continue
        line, module, _ = calls[-1]
        one = found[line, module]
        one[0] += len(calls)
        one[1] += sum(moved for _, _, moved in calls[1:])
    rows = [(line, module, count, size) for (line, module), (count, size) in found.items()]
    return sorted(rows, key=lambda row: -row[3])
