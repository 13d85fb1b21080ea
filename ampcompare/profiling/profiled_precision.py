"""A precision around the arm's own that shows the steps of any loop to a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, StepOutcome
from ampcompare.precision.wrapper import PrecisionWrapper
from ampcompare.profiling.step_profiler import Enough, StepProfiler

__all__ = ["ProfiledPrecision"]


class ProfiledPrecision(PrecisionWrapper):
    """Begins at `prepare`, and ends a step after `step`; or where the next batch is asked for, if the loop takes its
    batches from `batches`. The loop is ended by `Enough`.

    Args:
        inner: the arm.
        profiler: sees the steps.
    """

    def __init__(self, inner: Precision, profiler: StepProfiler) -> None:
        super().__init__(inner)
        self._profiler = profiler
        self._has_batches = False

    def batches(self, given: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, with the time that each takes as the phase "data"; a step begins with each."""
        self._has_batches = True
        source = self._profiler.marks.batches(given)
        for batch in source:
            yield batch
            self._end_step()

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prepared, stepped = super()._prepare(models, optimizers)
        self._profiler.marks.know([getattr(model, "_forward_module", model) for model in prepared])
        self._profiler.open()
        return prepared, stepped

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = self.inner.step(*optimizers)
        self._profiler.marks.enter("other")
        if not self._has_batches:
            self._end_step()
        return outcome

    def _end_step(self) -> None:
        self._profiler.end_step()
        if self._profiler.is_over:
            raise Enough
