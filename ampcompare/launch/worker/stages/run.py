"""The third stage of a cell: train, write each step, and read the machine."""

from __future__ import annotations

from collections.abc import Callable

from ampcompare.launch.base import Progress
from ampcompare.launch.stop_signal import stopped_by_signal
from ampcompare.launch.worker.line_file import LineFile
from ampcompare.launch.worker.progress_reporter import ProgressReporter
from ampcompare.launch.worker.stages.build import Cell
from ampcompare.records.evaluation import EpochResult

__all__ = ["run"]


def run(cell: Cell, on_progress: Callable[[Progress], None] | None = None) -> None:
    """Train to the end, or to a request to stop; write each step, and collect metrics and readings of the machine."""
    metrics, warmup_steps = cell.metrics, cell.config.warmup_steps
    reporter = None
    if on_progress is not None:
        reporter = ProgressReporter(
            metrics, cell.session.assembly.total_steps, cell.session.position.epoch, on_progress
        )
        cell.session.on_phase = reporter.enter
    files = LineFile(cell.steps_path), LineFile(cell.epochs_path)
    with cell.compute, cell.saver, files[0] as steps, files[1] as epochs, stopped_by_signal(cell.stop):
        epochs.write(map(_without_samples, metrics.epochs))  # of the run that this one resumes
        for event in cell.session.events():
            if isinstance(event, EpochResult):
                metrics.add_epoch(event)
                epochs.write([_without_samples(event)])
                continue
            metrics.add_steps(event)
            cell.monitor.sample(timed=metrics.num_steps > warmup_steps)
            if cell.monitor.energy is not None:
                is_timed = metrics.num_steps - len(event) >= warmup_steps
                cell.monitor.energy.after(event[0].epoch, len(event), timed=is_timed)
            steps.write(event)
            if reporter is not None:
                reporter.add(event)


def _without_samples(event: EpochResult) -> EpochResult:
    return event.model_copy(update={"per_sample": None})
