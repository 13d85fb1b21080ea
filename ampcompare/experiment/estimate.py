"""Estimate the time and memory of a plan from records in its run directory, or in others next to it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.analysis.runs.comparability import changed_settings
from ampcompare.base.errors import RecordError
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run import load_records, reusable
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["Estimate", "estimate"]

MAX_OTHERS = 20  # run directories whose records are read


@dataclass(frozen=True)
class Estimate:
    """What is left to do.

    Attributes:
        cells: number without a usable record. seconds: their total time; None if an arm has no record to estimate from.
        peak_bytes: the largest peak of any of them; None as for `seconds`.
        unknown: rows without a record.
    """

    cells: int
    seconds: float | None
    peak_bytes: int | None
    unknown: tuple[str, ...]


def estimate(plan: Plan, folder: Path) -> Estimate:
    """Estimate the cost of a plan: each arm costs what it did with other seeds of the same recipe.

    An arm that the run directory has no record of is looked up in the newest run directories next to it.
    """
    left = [
        (label, cell)
        for label, cell in zip(plan.labels, plan.cells, strict=True)
        if not (os.path.isdir(folder) and reusable(folder, cell).record)
    ]
    one_each = dict(left)
    alike: dict[str, list[RunRecord]] = {label: [] for label in one_each}
    for place in _places(folder):
        lacking = [label for label, found in alike.items() if not found]
        if not lacking:
            break
        records = _results(place)
        for label in lacking:
            alike[label] = [record for record in records if _is_alike(record, one_each[label])]
    unknown = tuple(label for label in plan.arms if label in alike and not alike[label])
    if unknown:
        return Estimate(len(left), None, None, unknown)
    peaks = [record.summary.peak_bytes or 0 for found in alike.values() for record in found]
    return Estimate(len(left), sum(_seconds(alike[label]) for label, _ in left), max(peaks, default=0), ())


def _places(folder: Path) -> list[Path]:
    """Return the run directory and the newest others next to it."""
    try:
        cells = sorted(folder.parent.glob("*/cells"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        cells = []
    return [folder, *[path.parent for path in cells if path.parent != folder][:MAX_OTHERS]]


def _results(folder: Path) -> list[RunRecord]:
    try:
        return [record for record in load_records(folder)[0] if record.status in ("completed", "diverged")]
    except RecordError:
        return []


def _is_alike(record: RunRecord, cell: RunConfig) -> bool:
    return record.config.arm == cell.arm and not changed_settings(record.config, cell)


def _seconds(records: Sequence[RunRecord]) -> float:
    return statistics.fmean(record.summary.wall_seconds or 0.0 for record in records)
