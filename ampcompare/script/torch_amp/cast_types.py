"""The types that an arm has given the weights of models, where a script casts these models between steps.

A script may cast its live model to save it, as by `model.half()`, and then back to fp32: it reads and saves what it has
asked for, and from its next call or step on the model has the types of the arm again.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampcompare.base.patches import Subscriptions
from ampcompare.base.tensors.products import HALF_DTYPES

TENSORS = ("_parameters", "_buffers")


class WeightTypeRestorer:
    """Notes the types of prepared models, and gives them back behind a cast of the script."""

    def __init__(self) -> None:
        self._types: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, str], torch.dtype]] = (
            weakref.WeakKeyDictionary()
        )
        self._changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._remove: Callable[[], None] = lambda: None

    def install(self, events: Subscriptions) -> None:
        """Follow casts from now on."""
        events.wrap(nn.Module, "_apply", self._follow_module_cast)
        events.call_at_end(lambda: self._remove())

    def note_types_of_models(self, models: Iterable[nn.Module]) -> None:
        """Note the types that models have now, as those of the arm."""
        for module in (part for model in models for part in model.modules()):
            self._types[module] = {
                (kind, name): tensor.dtype
                for kind in TENSORS
                for name, tensor in getattr(module, kind).items()
                if tensor is not None and tensor.is_floating_point()
            }

    def _follow_module_cast(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        if self._find_changed_tensors(module):
            if not self._changed:
                self._remove = register_module_forward_pre_hook(lambda *_: self.restore_types()).remove
            self._changed.add(module)
        return result

    def _find_changed_tensors(self, module: nn.Module) -> list[tuple[str, str, torch.dtype]]:
        """Return kind, name and noted type of the tensors of a module that have another one."""
        return [
            (kind, name, dtype)
            for (kind, name), dtype in self._types.get(module, {}).items()
            if (tensor := getattr(module, kind).get(name)) is not None and tensor.dtype is not dtype
        ]

    @torch.no_grad()
    def restore_types(self) -> None:
        """Give the modules that the script has cast since the last call the types of the arm."""
        if not self._changed:
            return
        self._remove()
        for module in self._changed:
            for kind, name, dtype in self._find_changed_tensors(module):
                tensor = getattr(module, kind)[name]
                if (
                    tensor.dtype in HALF_DTYPES and dtype in HALF_DTYPES
                ):  # which the script wants to compute in
                    continue
                if kind == "_buffers":
                    module._buffers[name] = tensor.to(dtype)
                else:
                    _cast_parameter_and_gradient(tensor, dtype)
        self._changed.clear()


def _cast_parameter_and_gradient(param: Tensor, dtype: torch.dtype) -> None:
    gradient, param.grad = param.grad, None
    param.data = param.data.to(dtype)
    param.grad = None if gradient is None else gradient.to(dtype)
