"""Guards of `amp.initialize`: what must not have been done to the models before, and not after."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ampcompare.guards.detector import Detector
from ampcompare.guards.place import Place, user_place

__all__ = ["HalfAfterInitialize", "InitializeAfterWrapping", "InitializeBeforeCuda", "InitializeTwice"]

WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel"})


class InitializeAfterWrapping(Detector):
    """A wrapper among what `amp.initialize` gets, or a module of it that is cast and that a wrapper holds already."""

    name = "initialize-after-wrapping"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def wrap(self, module: nn.Module) -> None:
        self._wrapped.add(module)

    def initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        casts = properties.cast_model_type not in (None, False, torch.float32)
        for model in models:
            names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__} & WRAPPERS
            if names:
                self.report(f"amp.initialize gets a model inside {names.pop()}")
            elif casts and model in self._wrapped:
                self.report("amp.initialize casts a model that a parallel wrapper holds already")


class InitializeBeforeCuda(Detector):
    """A module that goes to the GPU after `amp.initialize` and was not there at that time."""

    name = "initialize-before-cuda"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moved: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        for model in models:
            # Where the CPU stands in for the GPU no parameter is ever on it; that it was sent there counts.
            if any(not parameter.is_cuda for parameter in model.parameters()) and model not in self._moved:
                self._early.add(model)

    def cuda(self, module: nn.Module) -> None:
        parts = set(module.modules())
        self._moved.update(parts)
        if not self._early.isdisjoint(parts):
            self._early.difference_update(parts)
            self.report("a model goes to the GPU after amp.initialize")


class InitializeTwice(Detector):
    """An optimizer of an earlier `amp.initialize` that is trained after a later one."""

    name = "initialize-twice"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._places: list[Place] = []

    def initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        self._places.append(user_place())
        for optimizer in optimizers:
            self.facts.prepared[optimizer] = len(self._places)

    def block(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            call = self.facts.prepared.get(optimizer)
            if call is not None and call < len(self._places):
                first, second = self._places[call - 1], self._places[call]
                self.report(f"amp.initialize again, while what {first} prepared is still trained", second)


class HalfAfterInitialize(Detector):
    """A cast of initialized weights, reported when training goes on: the last act of a script may be an export."""

    name = "half-after-initialize"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cast: list[tuple[Place, str]] = []

    def initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        for model in models:
            self.facts.initialized.update(model.modules())

    def half(self, module: nn.Module) -> None:
        parts = [part for part in module.modules() if part in self.facts.initialized]
        entries = (entry for part in parts for entry in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
        if any(entry.dtype is torch.float32 for entry in entries):
            self._cast.append((user_place(), type(module).__name__))

    def backward(self, losses: Any, seeds: Any) -> None:
        cast, self._cast = self._cast, []
        for place, name in cast:
            self.report(f"{name} is cast to half after amp.initialize", place)
