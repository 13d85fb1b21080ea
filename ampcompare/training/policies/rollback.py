"""The policy `rollback`: a run that has diverged restores its last good state and continues with the next batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.skippable_step import settle
from ampcompare.runs.records.run import StepRecord
from ampcompare.runs.settings.config import RunConfig
from ampcompare.training.assemble import Assembly
from ampcompare.training.ema import ModelEma
from ampcompare.training.policies.divergence import DivergenceDetector
from ampcompare.training.policies.policy import Policy
from ampcompare.training.precision.base import Precision, owned_params

__all__ = ["Rollback", "Snapshot"]


class Snapshot:
    """Copies of all that a step changes: weights, masters, buffers, optimizer state, loss scales, EMA.

    State of an optimizer is kept by the index of its parameter, because Apex replaces parameters by masters in the
    first backward pass only; a snapshot from before it fills the masters from the model's weights, as Apex does.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        average: ModelEma | None = None,
    ) -> None:
        self._precision = precision
        self._average = average
        self._optimizers = list(optimizers)
        self._tensors: list[Tensor] = [tensor for model in models for tensor in model.parameters()]
        self._tensors += [tensor for model in models for tensor in model.buffers()]
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        for optimizer in optimizers:
            settle(optimizer)
        self._owned = [[param.detach().clone() for param in owned_params(each)] for each in optimizers]
        self._states = [[_copied(each.state.get(param, {})) for param in owned_params(each)] for each in optimizers]
        self._scaling = copy.deepcopy(precision.state_dict())
        self._averaged = None if average is None else copy.deepcopy(average.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; the snapshot can be restored again."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for optimizer, values, states in zip(self._optimizers, self._owned, self._states, strict=True):
            settle(optimizer)
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


class Rollback(Policy):
    """Takes a snapshot every few good steps, and restores the last one after divergence, a limited number of times.

    Args:
        divergence: of the run; a rollback clears it, unless a limit has ended the run.
        every: steps between two snapshots.
        max_rollbacks: how often a run may go back.

    Attributes:
        steps: updates made at each rollback; the count of updates itself is not set back.
    """

    name = "rollback"

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        average: ModelEma | None = None,
        *,
        divergence: DivergenceDetector,
        every: int,
        max_rollbacks: int,
    ) -> None:
        self._training = models, optimizers, precision, average
        self._divergence = divergence
        self._every = every
        self._max_rollbacks = max_rollbacks
        self._snapshot_step = 0
        self._snapshot: Snapshot | None = None
        self.steps: list[int] = []

    @classmethod
    def from_config(cls, config: RunConfig, assembly: Assembly, divergence: DivergenceDetector) -> Rollback | None:
        """Return the rollback of a configuration; None if it asks for none."""
        if config.on_nan != "rollback":
            return None
        return cls(
            assembly.replicas,
            assembly.optimizers,
            assembly.precision,
            assembly.average,
            divergence=divergence,
            every=config.rollback_every,
            max_rollbacks=config.max_rollbacks,
        )

    def begin(self, step: int) -> None:
        """Take the first snapshot: the state that the run starts or resumes from."""
        self._keep(step)

    def after_steps(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Restore the last snapshot if the run has diverged, else take one when it is due."""
        if self._divergence.is_final:
            return False
        if self._divergence.diverged_step is None:
            # A non-finite last loss may come from weights that are about to go bad.
            if math.isfinite(records[-1].loss):
                self._keep(step)
            return False
        if self._snapshot is None or len(self.steps) >= self._max_rollbacks:
            return False
        self._snapshot.restore()
        self.steps.append(step)
        self._divergence.recover()
        return True

    def _keep(self, step: int) -> None:
        if self._snapshot is None or step - self._snapshot_step >= self._every:
            self._snapshot = Snapshot(*self._training)
            self._snapshot_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the rollbacks so far; the last good state of a resumed run is its checkpoint."""
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = [int(step) for step in state["steps"]]
