"""The policy `rollback`: a run that has diverged goes back to its last good state, and on with the next batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, owned_params
from ampcompare.training.average import WeightAverage

__all__ = ["Rollback", "Snapshot"]


class Snapshot:
    """Copies of all that a step changes: weights, masters, buffers, optimizer state, loss scales, average.

    What belongs to an optimizer is kept by its place there, since Apex puts masters into these places only in the first
    backward pass; a snapshot from before it fills them from the model's own weights, as Apex does.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        average: WeightAverage | None = None,
    ) -> None:
        self._precision = precision
        self._average = average
        self._optimizers = list(optimizers)
        self._tensors: list[Tensor] = [tensor for model in models for tensor in model.parameters()]
        self._tensors += [tensor for model in models for tensor in model.buffers()]
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._owned = [[param.detach().clone() for param in owned_params(each)] for each in optimizers]
        self._states = [[_copied(each.state.get(param, {})) for param in owned_params(each)] for each in optimizers]
        self._scaling = copy.deepcopy(precision.state_dict())
        self._averaged = None if average is None else copy.deepcopy(average.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot stays good for another time."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for optimizer, values, states in zip(self._optimizers, self._owned, self._states, strict=True):
            for param, value, state in zip(owned_params(optimizer), values, states, strict=True):
                param.copy_(value)
                optimizer.state.pop(param, None)
                if state:
                    optimizer.state[param] = _copied(state)
        self._precision.load_state_dict(copy.deepcopy(self._scaling))
        self._precision.weights_replaced()
        if self._average is not None and self._averaged is not None:
            self._average.load_state_dict(self._averaged)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in state.items()
    }


class Rollback:
    """Takes a snapshot every so many good steps, and goes back to the last one, a limited number of times.

    Args:
        every: steps between two snapshots.
        most: how often a run may go back.

    Attributes:
        steps: updates made at each return, the run's own counting going on.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        average: WeightAverage | None = None,
        *,
        every: int,
        most: int,
    ) -> None:
        self._parts = models, optimizers, precision, average
        self._every = every
        self._most = most
        self._kept_at = 0
        self._snapshot: Snapshot | None = None
        self.steps: list[int] = []

    def keep(self, step: int) -> None:
        """Take in that the run is in a good state after `step` updates."""
        if self._snapshot is None or step - self._kept_at >= self._every:
            self._snapshot = Snapshot(*self._parts)
            self._kept_at = step

    def go_back(self, step: int) -> bool:
        """Restore the last good state after `step` updates; return False where that was done as often as it may be."""
        if self._snapshot is None or len(self.steps) >= self._most:
            return False
        self._snapshot.restore()
        self.steps.append(step)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the returns so far; where a run goes on from a checkpoint, that one is its last good state."""
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.steps = [int(step) for step in state["steps"]]
