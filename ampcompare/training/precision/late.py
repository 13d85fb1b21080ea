"""Outcomes of steps that stay on the device until they are read; one transfer reads all that are pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampcompare.training.precision.base import StepOutcome

__all__ = ["LateOutcomes"]

MAX_PENDING = 1024
Outcome = tuple[tuple[bool, ...], tuple[float, ...]]
"""`applied` and `loss_scales` of a step."""


class LateOutcomes:
    """Keeps the device scalars of steps, and resolves the steps in order when one of them is read."""

    def __init__(self) -> None:
        self._pending: list[_LateOutcome] = []

    def add(self, scalars: Sequence[Tensor], resolve: Callable[[list[float]], Outcome]) -> StepOutcome:
        """Return the outcome of a step.

        Args:
            scalars: of shape () and one device and dtype; nothing may write to them afterwards.
            resolve: returns `applied` and `loss_scales` of the step, given the values of its scalars; called once,
                after those of all earlier steps.
        """
        outcome = _LateOutcome(self, scalars, resolve)
        self._pending.append(outcome)
        if len(self._pending) > MAX_PENDING:  # a loop that never reads its outcomes must not keep them all
            self.resolve()
        return outcome

    def resolve(self) -> None:
        """Read all pending scalars in one transfer, and resolve their steps."""
        scalars = [scalar for outcome in self._pending for scalar in outcome.scalars]
        values = torch.stack(scalars).tolist() if scalars else []
        start = 0
        for outcome in self._pending:
            end = start + len(outcome.scalars)
            outcome.resolve(values[start:end])
            start = end
        self._pending.clear()


class _LateOutcome(StepOutcome):
    __slots__ = ("_outcomes", "_resolve", "_resolved", "scalars")

    def __init__(
        self, outcomes: LateOutcomes, scalars: Sequence[Tensor], resolve: Callable[[list[float]], Outcome]
    ) -> None:
        self._outcomes = outcomes
        self._resolve = resolve
        self._resolved: Outcome | None = None
        self.scalars = scalars

    def resolve(self, values: list[float]) -> None:
        self._resolved = self._resolve(values)
        del self._resolve, self._outcomes
        self.scalars = ()

    def _read(self) -> Outcome:
        if self._resolved is None:
            self._outcomes.resolve()
            assert self._resolved is not None
        return self._resolved

    @property
    def applied(self) -> tuple[bool, ...]:
        return self._read()[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self._read()[1]
