"""An update in several phases: each has its own loss, and steps its optimizers before the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.parallel.replication import Parallel
from ampcompare.precision.base import Precision, StepOutcome
from ampcompare.tasks.task import LossOf, Phase
from ampcompare.training.loop import update

__all__ = ["PhasedUpdate"]


class PhasedUpdate:
    """Replaces `update` for a task with several phases. The loss of each phase has a loss scaler, where the arm has
    one for each loss.

    Args:
        phases: in their order.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases

    def __call__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        parallel: Parallel,
        loss_of: LossOf,
        microbatches: Sequence[Any],
        clip_norm: float | None = None,
    ) -> tuple[list[Tensor], Tensor | None, StepOutcome]:
        """Make one update; see `ampcompare.training.loop.update`. `loss_of` is not used: each phase has its own."""
        losses, norms, outcomes = [], [], []
        for loss_id, phase in enumerate(self.phases):
            stepped = [optimizers[place] for place in phase.optimizers]
            some, norm, outcome = update(
                models, stepped, precision, parallel, phase.loss, microbatches, clip_norm, loss_id
            )
            # A loss may reach the models of other phases too; what it leaves there is not for their optimizers.
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += some
            norms += [] if norm is None else [norm]
            outcomes.append(outcome)
        return losses, torch.stack(norms).amax() if norms else None, _Outcomes(outcomes, self.phases, len(optimizers))


class _Outcomes(StepOutcome):
    """The outcome of an update in phases."""

    __slots__ = ("_count", "_outcomes", "_phases")

    def __init__(self, outcomes: Sequence[StepOutcome], phases: Sequence[Phase], count: int) -> None:
        self._outcomes = outcomes
        self._phases = phases
        self._count = count

    @property
    def applied(self) -> tuple[bool, ...]:
        applied = [True] * self._count
        for outcome, phase in zip(self._outcomes, self._phases, strict=True):
            for place, one in zip(phase.optimizers, outcome.applied, strict=True):
                applied[place] = applied[place] and one
        return tuple(applied)

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self._outcomes[-1].loss_scales
