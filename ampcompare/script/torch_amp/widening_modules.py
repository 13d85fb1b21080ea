"""Modules of a cast model that give fp32 where they got 16 bits, so that the next ones do not fit.

So do norms that compute in fp32 and keep their result so, and layers with fp32 tensors that are no buffers. Kept in
fp32 by the arm they return the type of their inputs.
"""

import weakref
from typing import Any

import torch
from torch import nn

from ampcompare.base.patches import Layer, PatchPoints, Subscriptions
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.tree import first_floating_type

MAX_MODULES = 64


class WideningModulesWatch:
    """Notes them until the first backward pass, behind which a script that does not fit has failed."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._calls = Subscriptions(Layer.RECORD)

    def follow(self, events: Subscriptions) -> None:
        """Note them from now on."""
        self._calls.wrap(*PatchPoints.FORWARD, self._note_if_widening)
        self._calls.wrap(*PatchPoints.BACKWARD, self._end_at_first_backward)
        events.call_at_end(self._calls.end)

    def names_of_innermost_widening_modules(self, model: nn.Module) -> list[str]:
        """Return the names of those in a model, the innermost ones alone, in the order of their calls."""
        names = {id(module): name for name, module in model.named_modules()}
        noted = [module for one in self._modules if (module := one()) is not None]
        found = [names[id(module)] for module in noted if names.get(id(module))]
        return [one for one in found if not any(other.startswith(f"{one}.") for other in found)]

    def _note_if_widening(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        if first_floating_type((args, kwargs)) in HALF_DTYPES and len(self._modules) < MAX_MODULES:
            if first_floating_type(result) is torch.float32 and all(
                one() is not module for one in self._modules
            ):
                self._modules.append(weakref.ref(module))
        return result

    def _end_at_first_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._calls.end()
        return original(*args, **kwargs)
