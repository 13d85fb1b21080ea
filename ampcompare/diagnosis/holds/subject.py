"""From a module or a function and its inputs to a training loop that any arm can train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ampcompare.diagnosis.measure import Loop
from ampcompare.precision.base import Precision

__all__ = ["loop_of"]

Inputs = Sequence[Any] | Mapping[str, Any]


def loop_of(subject: Callable[..., Any], inputs: Inputs, loss: Callable[[Any], Any] | None, device: str) -> Loop:
    """Return a loop that trains a copy of a module, or the inputs of a function, and leaves the weights as they are.

    Args:
        inputs: positional or keyword arguments; tensors are moved to the device and passed as copies.
        loss: of the output; None for a fixed random weighting.
    """
    given: Any = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)

    def train(precision: Precision) -> None:
        values = tree_map(lambda value: _fresh(value, device), given)
        if isinstance(subject, nn.Module):
            model: nn.Module = copy.deepcopy(subject).to(device)
        else:
            model, values = _Function(subject, values, precision.half_dtype).to(device), ()
        params = [param for param in model.parameters() if param.requires_grad]
        # Without parameters there is nothing to update; an optimizer must have one all the same.
        if not params:
            model.register_parameter("_unused", nn.Parameter(torch.zeros(1, device=device)))
            params = list(model.parameters())
        # The weights stay, so that steps that a loss scale skips change nothing.
        (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(params, lr=0.0)])
        while True:
            with precision.autocast():
                output = model(**values) if isinstance(values, dict) else model(*values)
                result = weighted(output) if loss is None else loss(output)
            precision.backward(result, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    return train


def _fresh(value: Any, device: str) -> Any:
    return value.detach().clone().to(device) if isinstance(value, Tensor) else value


def weighted(output: Any) -> Tensor:
    """Return the mean of the floating results, each element with a random weight that is always the same."""
    draws = torch.Generator().manual_seed(0)
    total: Tensor | None = None
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.is_floating_point():
            weights = torch.randn(value.shape, generator=draws).to(value.device)
            part = (value.float() * weights).mean()
            total = part if total is None else total + part
    if total is None:
        raise TypeError("the output has no floating tensor; pass loss=, a function of it")
    return total


class _Function(nn.Module):
    """A function whose floating arguments are parameters, cast as the results of a layer are.

    Args:
        dtype: 16-bit type of the arm; None for none.
    """

    def __init__(self, function: Callable[..., Any], values: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._function = function
        self._dtype = dtype
        self._values = values
        for name, value in self._named():
            if isinstance(value, Tensor) and value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value))

    def _named(self) -> list[tuple[str, Any]]:
        if isinstance(self._values, dict):
            return [(f"input_{name}", value) for name, value in self._values.items()]
        return [(f"input_{place}", value) for place, value in enumerate(self._values)]

    def forward(self) -> Any:
        values = [
            self._cast(self._parameters[name]) if name in self._parameters else one for name, one in self._named()
        ]
        if isinstance(self._values, dict):
            return self._function(**dict(zip(self._values, values, strict=True)))
        return self._function(*values)

    def _cast(self, value: Any) -> Any:
        return value if self._dtype is None else value.to(self._dtype)
