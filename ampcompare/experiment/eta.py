"""What a comparison that has not begun will take, by records of its run directory and the steps before it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.errors import RecordError
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.analysis.pairing.comparability import changed_settings
from ampcompare.results.records.preflight import Preflight
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig


@dataclass(frozen=True)
class _RemainingCellsAndCost:
    """What is left to do.

    Attributes:
        cells: number without a usable record. seconds: their total time; None if it is not known.
        peak_bytes: the largest peak of any of them; None without records.
        unknown: rows without a record.
    """

    cells: int
    seconds: float | None
    peak_bytes: int | None
    unknown: tuple[str, ...]


def estimate_remaining_cost(
    plan: Plan, folder: Path, preflight: Preflight | None = None
) -> _RemainingCellsAndCost:
    """Estimate the cost of a plan: each arm costs what it did with other seeds of the same recipe.

    Args:
        plan: its cells.
        folder: the run directory, which need not exist; cells with a usable record there cost nothing.
        preflight: the steps that were tried before the first cell, for arms without a record; None without those.
    """
    run = RunDirectory(folder)
    left: list[tuple[str, RunConfig]] = []
    for label, cell in zip(plan.labels, plan.cells, strict=True):
        is_done = folder.is_dir() and run.find_reusable_record_and_reason(cell).record is not None
        is_refused = preflight is not None and preflight.is_refused(label)
        if not is_done and not is_refused:
            left.append((label, cell))
    records = _records_with_result(run)
    alike = {
        label: [
            run for run in records if run.config.arm == cell.arm and not changed_settings(run.config, cell)
        ]
        for label, cell in dict(left).items()
    }
    unknown = tuple(label for label in plan.arms if label in alike and not alike[label])
    peaks = [record.summary.peak_bytes or 0 for runs in alike.values() for record in runs]
    peak = None if unknown else max(peaks, default=0)
    rest: float | None = 0.0
    if unknown:
        untrained = [label for label, _ in left if label in unknown]
        rest = None if preflight is None else preflight.estimate_seconds(untrained)
    if rest is not None:
        rest += sum(_mean_seconds_of_records(alike[label]) for label, _ in left if label not in unknown)
    return _RemainingCellsAndCost(len(left), rest, peak, unknown)


def _records_with_result(run: RunDirectory) -> list[RunRecord]:
    try:
        return [record for record in run.read_records_and_faults()[0] if record.has_result]
    except RecordError:
        return []


def _mean_seconds_of_records(records: list[RunRecord]) -> float:
    return statistics.fmean(record.summary.wall_seconds or 0.0 for record in records)
