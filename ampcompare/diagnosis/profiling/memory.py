"""Who holds memory in a step: every storage from its first tensor to its end, and what it is for."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.cuda_casts import TO_COPY
from ampcompare.base.tensors.products import OperationMode, dtype_name
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.diagnosis.profiling.marks import PhaseFollower
from ampcompare.results.records.profile import HeldMemory, MemoryAtPeak
from ampcompare.training.precision.base import owned_params

MAX_LAYERS = 8
ACTIVATIONS = "activations"
CACHED_CASTS = "casts cached by autocast"
WEIGHTS = "weights"
MASTERS = "master weights"
STATE = "optimizer state"
GRADIENTS = "gradients"
BATCH = "batch"
TEMPORARY = "results in use"


@dataclass(frozen=True)
class AllocatorBlock:
    """A block of an allocator that is in use, and when it was allocated, in ns since 1970."""

    address: int
    bytes: int
    begin: int
    end: float  # when its address was allocated again, at the earliest


@dataclass
class _LiveStorage:
    """A storage while it lives; times in ns since 1970."""

    bytes: int
    dtype: str
    module: str
    phase: str
    kind: str = ""  # what it is for; "" until it is known
    source: _LiveStorage | None = None  # of which it is a cast
    saved: bool = False  # for the backward pass
    address: int = 0
    made: int = 0
    ended: int | None = None


class MemoryLedger(OperationMode):
    """Counts storages from `begin` to `end`, those that operations make while it is entered."""

    def __init__(self, marks: PhaseFollower, device: torch.device) -> None:
        super().__init__()
        self.is_idle = True
        self._marks = marks
        self._device = device
        self._live: dict[int, _LiveStorage] = {}
        self._first: list[_LiveStorage] = []
        self._all: dict[int, list[_LiveStorage]] = defaultdict(list)
        self._finalizers: list[Any] = []
        self._hooks: Any = None

    def begin(self) -> None:
        """Count what models and optimizers hold, and begin to follow storages."""
        self.is_idle = False
        weights = [one for model in self._marks.models for one in [*model.parameters(), *model.buffers()]]
        for tensor in weights:
            self._note_held_tensor(tensor, WEIGHTS)
            if tensor.grad is not None:
                self._note_held_tensor(tensor.grad, GRADIENTS)
        for optimizer in self._marks.optimizers:
            for param in owned_params(optimizer):
                # A script names no model: what an optimizer steps is a weight then.
                self._note_held_tensor(param, MASTERS if self._marks.models else WEIGHTS)
                if param.grad is not None:
                    self._note_held_tensor(param.grad, GRADIENTS)
            for values in list(optimizer.state.values()):
                for value in tensors_in_value(values):
                    self._note_held_tensor(value, STATE)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._mark_saved_tensor, lambda tensor: tensor)
        self._hooks.__enter__()

    def begin_step(self) -> None:
        """Begin the step whose peak counts; what the step before it left is known by now."""
        self._first = [one for one in self._first if one.ended is None]

    def end(self) -> None:
        self.is_idle = True
        self._hooks.__exit__(None, None, None)
        for finalizer in self._finalizers:
            finalizer.detach()

    def see_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow the storages of the results of an operation that are new."""
        inputs = [*tensors_in_value(args), *tensors_in_value(kwargs)]
        is_cast = func is TO_COPY
        given = {self._find_storage_key(tensor) for tensor in inputs}
        for tensor in tensors_in_value(result):
            key = self._find_storage_key(tensor)
            # a view of what was there before, such as a data set
            if key is None or key in self._live or key in given:
                continue
            source = None
            if is_cast and inputs:
                other = self._find_storage_key(inputs[0])
                source = None if other is None else self._live.get(other)
            one = self._add_storage(tensor, key)
            if source is not None:
                one.source = source
                is_narrower = tensor.element_size() < inputs[0].element_size()
                if is_narrower and source.kind in (WEIGHTS, MASTERS) and self._marks.phase == "forward":
                    one.kind = CACHED_CASTS

    def mark_storages_of_gradients(self) -> None:
        models, stepped = self._marks.models, map(owned_params, self._marks.optimizers)
        for param in chain(*(model.parameters() for model in models), *stepped):
            if param.grad is not None:
                key = self._find_storage_key(param.grad)
                if key is not None and key in self._live:
                    self._live[key].kind = GRADIENTS

    def memory_at_peak(
        self,
        blocks: Sequence[AllocatorBlock],
        measured_bytes: int | None = None,
        reserved_bytes: int | None = None,
    ) -> MemoryAtPeak:
        """Return what holds the peak, from the allocator's blocks since `begin` that are in use then.

        `measured_bytes` and `reserved_bytes` are bytes of a GPU's allocator; on a CPU its blocks are summed up.
        """
        storages = [*self._first]
        for block in blocks:
            known = (one for one in self._all.get(block.address, ()) if block.begin <= one.made < block.end)
            if (first := next(known, None)) is not None:
                storages.append(first)
        alive = {id(one) for one in storages}
        gone = {id(one) for ones in self._all.values() for one in ones if id(one) not in alive}
        if measured_bytes is None:
            measured_bytes = sum(one.bytes for one in self._first) + sum(block.bytes for block in blocks)
        held: dict[tuple[str, str], int] = defaultdict(int)
        layers: dict[tuple[str, str], int] = defaultdict(int)
        twice: dict[tuple[str, str], int] = defaultdict(int)
        for one in storages:
            kind = self._kind_of_storage(one)
            held[kind, one.dtype] += one.bytes
            if kind == ACTIVATIONS:
                layers[one.module, one.dtype] += one.bytes
                if one.source is not None and one.source.saved and id(one.source) not in gone:
                    twice[one.module, one.dtype] += min(one.bytes, one.source.bytes)
        return MemoryAtPeak(
            measured_bytes=measured_bytes,
            held=[
                HeldMemory(kind=kind, dtype=dtype, bytes=size)
                for (kind, dtype), size in _holders_by_size(held)
            ],
            rest_bytes=measured_bytes - sum(held.values()),
            layers=[
                HeldMemory(kind=name, dtype=dtype, bytes=size)
                for (name, dtype), size in _holders_by_size(layers)[:MAX_LAYERS]
            ],
            kept_twice_bytes=sum(twice.values()),
            kept_twice=[
                HeldMemory(kind=name, dtype=dtype, bytes=size)
                for (name, dtype), size in _holders_by_size(twice)[:MAX_LAYERS]
            ],
            reserved_bytes=reserved_bytes,
        )

    def _kind_of_storage(self, one: _LiveStorage) -> str:
        if one.kind:
            return one.kind
        if one.phase == "data":
            return BATCH
        return ACTIVATIONS if one.saved else TEMPORARY

    def _note_held_tensor(self, tensor: Tensor, kind: str) -> None:
        key = self._find_storage_key(tensor)
        if key is not None and key not in self._live:
            one = self._add_storage(tensor, key)
            one.kind = kind
            self._first.append(one)

    def _mark_saved_tensor(self, tensor: Tensor) -> Tensor:
        if not self.is_idle:
            key = self._find_storage_key(tensor)
            if key is not None and key in self._live:
                self._live[key].saved = True
        return tensor

    def _find_storage_key(self, tensor: Tensor) -> int | None:
        if tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return None
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            return None  # a subclass without storage

    def _add_storage(self, tensor: Tensor, key: int) -> _LiveStorage:
        storage = tensor.untyped_storage()
        one = _LiveStorage(
            storage.nbytes(), dtype_name(tensor.dtype), self._marks.running_module, self._marks.phase
        )
        one.address, one.made = storage.data_ptr(), time.time_ns()
        self._live[key] = one
        self._all[one.address].append(one)
        finalizer = weakref.finalize(storage, self._note_storage_freed, key)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        return one

    def _note_storage_freed(self, key: int) -> None:
        one = self._live.pop(key, None)
        if one is not None and not self.is_idle:
            one.ended = time.time_ns()


def _holders_by_size(sizes: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    return sorted(((key, size) for key, size in sizes.items() if size), key=lambda pair: (-pair[1], pair[0]))
