"""The models of a script that names none: the modules that it calls, whose weights its optimizers hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ampcompare.base.errors import PreparationError
from ampcompare.guards.events import Points, Subscriptions
from ampcompare.precision.base import owned_params
from ampcompare.script.apex_amp.session import here
from ampcompare.script.keep_fp32 import WRAPPERS, bare_model
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers

__all__ = ["FoundModels"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they hold models, and are never called


class FoundModels:
    """Finds models and optimizers when the script first calls a module whose weights an optimizer holds.

    That module is a model, or the whole is that it is a part of, where one optimizer has weights of both. Weights of
    optimizers that it lacks belong to others, which the script may call later: to the largest modules that lack it.

    Args:
        name: of the arm, for messages.
        found: called once, with models and optimizers, before the module runs.
        is_over: returns whether the script has named its models by itself.

    Raises:
        PreparationError: from the script's call, if the module is sharded.
    """

    def __init__(
        self,
        name: str,
        found: Callable[[list[nn.Module], list[Any]], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._found = found
        self._is_over = is_over
        self._optimizers: list[weakref.ref[Any]] = []
        self._is_done = False
        self._wrappers = ParallelWrappers()

    def install(self, events: Subscriptions) -> None:
        """Follow the optimizers from now on."""
        events.wrap(*Points.MAKE_OPTIMIZER, self._made)
        self._wrappers.install(events)

    def _made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _live(self) -> list[Any]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def look_at(self, module: nn.Module) -> None:
        """Look at a module that the script calls, before it is called."""
        if self._is_done:
            return
        if self._is_over():
            self._is_done = True
            return
        held = {id(param) for optimizer in self._live() for param in owned_params(optimizer)}
        if not held or not (torch.is_grad_enabled() or self._wrappers.is_alone()):
            return  # a wrapper is made again by all ranks, and an evaluation may run on one
        model = bare_model(module)
        if held.isdisjoint(map(id, model.parameters())):
            return
        self._is_done = True
        gc.collect()  # those that the script has replaced by others
        optimizers = self._live()
        tree = _Tree()
        model = _whole(model, optimizers, tree)
        models = [model, *tree.others(model, held)]
        for one in models:
            self._check(one, tree)
        self._wrappers.check(models, self._name)
        self._found(models, optimizers)
        self._wrappers.make_again(models)

    def _check(self, model: nn.Module, tree: _Tree) -> None:
        kind = type(model).__name__
        if tree.is_sharded(model):
            raise PreparationError(
                here(
                    f"the weights of {kind} are sharded, so {self._name} cannot cast them; use an arm that keeps "
                    f"fp32 weights"
                )
            )


def _whole(model: nn.Module, optimizers: Sequence[Any], tree: _Tree) -> nn.Module:
    """Return the module that a model is a part of, as long as an optimizer has weights of both; else the model."""
    parent = tree.parent_of(model)
    if parent is None:
        return model
    own = set(map(id, model.parameters()))
    around = set(map(id, parent.parameters())) - own
    for optimizer in optimizers:
        held = set(map(id, owned_params(optimizer)))
        if held & own and held & around:
            return _whole(parent, optimizers, tree)
    return model


class _Tree:
    """All modules of this process, and which holds which."""

    def __init__(self) -> None:
        # `type` and `vars`: the objects of libraries may answer `isinstance` by code of their own.
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        self._modules = [one for one in modules if "_modules" in vars(one)]
        self._parents: dict[int, list[nn.Module]] = {}
        for module in self._modules:
            for child in module._modules.values():
                if child is not None:
                    self._parents.setdefault(id(child), []).append(module)

    def others(self, model: nn.Module, held: Iterable[int]) -> list[nn.Module]:
        """Return the largest modules without `model` that have further tensors of `held`, given as ids."""
        missing = set(held) - set(map(id, model.parameters()))
        found: list[nn.Module] = []
        if not missing:
            return found
        sizes = {id(one): [id(part) for part in one.modules()] for one in self._modules}
        for one in sorted(self._modules, key=lambda each: -len(sizes[id(each)])):
            if id(model) in sizes[id(one)] or _is_shell(one):
                continue
            own = set(map(id, one.parameters()))
            if own & missing:
                found.append(one)
                missing -= own
        return found

    def is_sharded(self, model: nn.Module) -> bool:
        """Return whether FSDP has sharded the weights of a model, in either of its forms."""
        around = [*self._parents.get(id(model), []), *model.modules()]
        is_wrapped = any(type(one).__name__ == "FullyShardedDataParallel" for one in around)
        return is_wrapped or any(type(param).__name__ == "DTensor" for param in model.parameters())

    def parent_of(self, model: nn.Module) -> nn.Module | None:
        """Return a module that holds a model as its part, wrappers and containers left out; None if there is none."""
        for one in self._parents.get(id(model), []):
            if not _is_shell(one):
                return one
            if (above := self.parent_of(one)) is not None:
                return above
        return None


def _is_shell(module: nn.Module) -> bool:
    """Return whether a module only holds or wraps models."""
    return type(module).__name__ in WRAPPERS or isinstance(module, CONTAINERS)
