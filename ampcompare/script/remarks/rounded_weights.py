"""Weights that a script casts to 16 bits and back between its steps, as for an evaluation: they keep 16 bits of each.

A copy that is cast, and weights that are put back from what was saved before, lose nothing.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ampcompare.base.location import Location, user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Subscriptions
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.training.precision.base import owned_params

MAX_WEIGHTS = 8  # of one optimizer that are looked at


class RoundedWeightsWatch:
    """Notes that a step begins from fp32 weights which were rounded since the last one, once for each line."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._cast = WeakTensorKeyDictionary()  # weights in fp32 -> type and line of their cast to 16 bits
        self._noted: set[Location] = set()

    def follow(self, steps: OptimizerStepEvents, events: Subscriptions) -> None:
        """Begin now."""
        events.wrap(nn.Module, "_apply", self._note_weights_cast_from_half)
        steps.call_before_each(self._before_step)

    def _note_weights_cast_from_half(self, inner: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [(param, param.dtype) for param in module._parameters.values() if param is not None]
        result = inner(module, *args, **kwargs)
        for param, dtype in before:
            if dtype is torch.float32 and param.dtype in HALF_DTYPES:
                self._cast[param] = param.dtype, user_location()
        return result

    def _before_step(self, optimizer: Any) -> None:
        if optimizer in self._stepped and len(self._cast):
            owned = owned_params(optimizer)
            cast = [param for param in owned if param in self._cast and param.dtype is torch.float32]
            if cast and all(map(self._has_only_values_of_half_type, cast[:MAX_WEIGHTS])):
                dtype, where = self._cast[cast[0]]
                if where not in self._noted:
                    self._noted.add(where)
                    self._rows.add_rounding_remark(
                        f"fp32 weights were cast to {dtype_name(dtype)} between two steps and back, which leaves them "
                        f"rounded: cast a copy, or evaluate under autocast ({where})"
                    )
            for param in owned:
                if param.dtype is torch.float32:
                    self._cast.pop(param, None)
        self._stepped.add(optimizer)

    def _has_only_values_of_half_type(self, param: Tensor) -> bool:
        """Return whether all elements have a value of the 16-bit type, which a trained weight has by a cast alone."""
        dtype, _ = self._cast[param]
        values = param.detach()
        return bool((values == values.to(dtype).float()).all())
