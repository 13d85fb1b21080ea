"""What a step may change, kept so that it can be undone: weights, state, settings and own counters of optimizers."""

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.training.precision.base import owned_params

SIMPLE = (int, float, bool, str, bytes, complex, type(None))


class StepSnapshot:
    """Weights, and what optimizers hold, at the start of a step; tensors and containers stay the same objects.

    It costs a copy of the weights and of the optimizers' state.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._known: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used again
        for optimizer in optimizers:
            for param in owned_params(optimizer):
                self._keep_copy_of_value(param)
            self._keep_copy_of_value(optimizer)

    @torch.no_grad()
    def restore_weights_and_state(self) -> None:
        """Let all be what it was."""
        for undo in self._undo:
            undo()

    def _keep_copy_of_value(self, value: Any) -> None:
        if isinstance(value, SIMPLE) or id(value) in self._known:
            return
        self._known.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, Optimizer):
            self._keep_mapping(vars(value))
        elif isinstance(value, MutableMapping):
            self._keep_mapping(value)
        elif isinstance(value, MutableSequence):  # a deque too
            self._keep_list(value)
        elif isinstance(value, tuple):
            for one in value:
                self._keep_copy_of_value(one)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_sparse or tensor.is_meta:
            return
        copy = tensor.detach().clone()
        self._undo.append(lambda: _write_if_changed(tensor, copy))

    def _keep_mapping(self, held: MutableMapping[Any, Any]) -> None:
        entries = dict(held)

        def undo() -> None:
            for key in [key for key in held if key not in entries]:
                del held[key]
            held.update(entries)

        self._undo.append(undo)
        for value in entries.values():
            self._keep_copy_of_value(value)

    def _keep_list(self, held: MutableSequence[Any]) -> None:
        entries = list(held)

        def undo() -> None:
            if isinstance(held, deque):
                held.clear()
                held.extend(entries)
            else:
                held[:] = entries

        self._undo.append(undo)
        for value in entries:
            self._keep_copy_of_value(value)


def _write_if_changed(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor; where nothing has changed it, its version stays."""
    if not torch.equal(tensor.detach(), values):
        tensor.detach().copy_(values)
