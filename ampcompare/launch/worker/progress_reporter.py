"""Report how far a cell is, from what was read from the device anyway: nothing here waits for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ampcompare.launch.base import Phase, Progress
from ampcompare.records.run import StepRecord
from ampcompare.training.metrics.run_summary import RunMetrics

__all__ = ["ProgressReporter"]


class ProgressReporter:
    """Reports each block of steps, and each phase that begins.

    Args:
        metrics: of the run, to which a block is added before it is reported.
        total_steps: updates of the whole run.
        epoch: that the run begins with.
        on_progress: receives the reports.
    """

    def __init__(
        self, metrics: RunMetrics, total_steps: int, epoch: int, on_progress: Callable[[Progress], None]
    ) -> None:
        self._metrics = metrics
        self._on_progress = on_progress
        loss = metrics.losses[-1] if metrics.losses else None  # of a run that was resumed
        self._latest = Progress(
            metrics.num_steps, total_steps, epoch, "training", loss, metrics.final_loss_scale, metrics.skipped_steps
        )

    def add(self, records: Sequence[StepRecord]) -> None:
        """Report a block of steps."""
        metrics, last = self._metrics, records[-1]
        self._latest = Progress(
            metrics.num_steps,
            self._latest.total_steps,
            last.epoch,
            "training",
            last.loss,
            metrics.final_loss_scale,
            metrics.skipped_steps,
            statistics.median([record.seconds for record in records]),
        )
        self._on_progress(self._latest)

    def enter(self, phase: Phase) -> None:
        """Report that a phase begins."""
        self._latest = self._latest._replace(phase=phase)
        self._on_progress(self._latest)
