"""Guards of `amp.initialize`: what must not be done to the models before it, or after it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.base.location import Location, user_location
from ampcompare.guards.detection.detector import Detector, guard_of_name

if TYPE_CHECKING:
    from torch import nn

WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel"})


class InitializeAfterWrapping(Detector):
    """A wrapper in what `amp.initialize` gets, or a module that it casts and that a wrapper contains already."""

    guard = guard_of_name("initialize-after-wrapping")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def at_parallel_wrapping(self, module: nn.Module) -> None:
        self._wrapped.add(module)

    def at_initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        import torch

        casts = properties.cast_model_type not in (None, False, torch.float32)
        for model in models:
            names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__} & WRAPPERS
            if names:
                self.report(f"amp.initialize is passed a model inside {names.pop()}")
            elif casts and model in self._wrapped:
                self.report("amp.initialize casts a model that a parallel wrapper already contains")


class InitializeBeforeCuda(Detector):
    """A module that is moved to the GPU after `amp.initialize` and was not there before."""

    guard = guard_of_name("initialize-before-cuda")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moved: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def at_initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        for model in models:
            # Under `--device cpu` no parameter is ever on a GPU; what counts is that it was sent there.
            if any(not parameter.is_cuda for parameter in model.parameters()) and model not in self._moved:
                self._early.add(model)

    def at_move_to_gpu(self, module: nn.Module) -> None:
        parts = set(module.modules())
        self._moved.update(parts)
        if not self._early.isdisjoint(parts):
            self._early.difference_update(parts)
            self.report("a model is moved to the GPU after amp.initialize")


class OptimizerOfEarlierInitialize(Detector):
    """An optimizer of an earlier `amp.initialize` that is trained after a later one."""

    guard = guard_of_name("initialize-twice")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: list[Location] = []

    def at_initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        self._calls.append(user_location())
        for optimizer in optimizers:
            self.facts.prepared[optimizer] = len(self._calls)

    def at_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            call = self.facts.prepared.get(optimizer)
            if call is not None and call < len(self._calls):
                first, second = self._calls[call - 1], self._calls[call]
                self.report(
                    f"amp.initialize is called again while the model that {first} prepared is still trained",
                    second,
                )


class HalfAfterInitialize(Detector):
    """A cast of initialized weights, reported when training goes on: the last act of a script may be an export."""

    guard = guard_of_name("half-after-initialize")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cast: list[tuple[Location, str]] = []

    def at_initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        for model in models:
            self.facts.initialized.update(model.modules())

    def at_half_cast(self, module: nn.Module) -> None:
        import torch

        parts = [part for part in module.modules() if part in self.facts.initialized]
        entries = (
            entry
            for part in parts
            for entry in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        )
        if any(entry.dtype is torch.float32 for entry in entries):
            self._cast.append((user_location(), type(module).__name__))

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        cast, self._cast = self._cast, []
        for location, name in cast:
            self.report(f"{name} is cast to half after amp.initialize", location)
