"""How long the rest of a matrix will take: every arm has its own cost.

An arm costs the mean of its cells that ran in this call; else of its records that were there before; else the
projection of its running cell; else the mean of the arms whose cost is known. A cached cell costs nothing.
"""

from __future__ import annotations

import heapq
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import RunFile
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import Outline
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.analysis.pairing.comparability import changed_settings
from ampcompare.results.records.preflight import Preflight
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["TimeLeft", "estimate"]

FIRST_SHARE = 0.02  # of the steps of a cell: below it, they say little about the whole
MAX_OTHERS = 20  # run directories whose records are read


@dataclass
class _Running:
    """A running cell; times are those of the caller's clock.

    Attributes:
        trained: when its first share of the steps was reported, and which: above 0 in a resumed cell.
    """

    began: float
    trained: tuple[float, float] | None = None
    latest: float = 0.0
    share: float = 0.0

    def add(self, progress: Progress, now: float) -> None:
        self.latest = now
        if not progress.total_steps:
            return
        share = min(1.0, progress.steps / progress.total_steps)
        if share < self.share:  # its process was lost, and another one trains it again
            self.began, self.trained = now, None
        self.share = share
        self.trained = self.trained or (now, share)

    @property
    def first_share(self) -> float:
        """The share of the steps that an earlier call has made."""
        return self.trained[1] if self.trained else 0.0

    @property
    def share_made(self) -> float:
        """The share of the steps of this call that are made, 0 to 1."""
        return (self.share - self.first_share) / (1 - self.first_share) if self.first_share < 1 else 1.0

    def projected_seconds(self) -> float | None:
        """Return the projected seconds of the cell in this call; None while unknown."""
        if self.trained is None or self.share_made < FIRST_SHARE:
            return None
        return self.trained[0] - self.began + (self.latest - self.trained[0]) / self.share_made


class TimeLeft:
    """Follows the cells of an outline. All times come from the caller, in seconds of one clock."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self._waiting = {index for index, record in enumerate(outline.cached) if record is None}
        self._running: dict[int, _Running] = {}
        self._slots = outline.jobs  # a queue runs as many cells at a time as it likes
        self._ended: dict[str, list[float]] = {}
        self._earlier: dict[str, list[float]] = {}
        for label, record in zip(outline.labels, outline.cached, strict=True):
            if record is not None and record.jobs == outline.jobs and record.summary.wall_seconds:
                self._earlier.setdefault(label, []).append(record.summary.wall_seconds)

    def begin(self, index: int, now: float) -> None:
        """Record the start of a cell, by its index from 0."""
        self._waiting.discard(index)
        self._running[index] = _Running(now)
        self._slots = max(self._slots, len(self._running))

    def report(self, index: int, progress: Progress, now: float) -> None:
        """Record the progress of a running cell."""
        if index in self._running:
            self._running[index].add(progress, now)

    def end(self, index: int, now: float, *, reused: bool = False) -> None:
        """Record the end of a cell."""
        cell = self._running.pop(index, None)
        if cell is not None and not reused:
            whole = (now - cell.began) / max(FIRST_SHARE, 1 - cell.first_share)
            self._ended.setdefault(self.outline.labels[index], []).append(whole)

    def share(self, index: int) -> float:
        """Return the share of its steps that a running cell has made, 0 to 1."""
        return self._running[index].share if index in self._running else 0.0

    def of_cell(self, index: int, now: float) -> float | None:
        """Return how long a running cell will still take; None while that is unknown."""
        cell, known = self._running.get(index), self._costs().get(self.outline.labels[index])
        if cell is None or known is None:
            return None
        whole, projected = known * (1 - cell.first_share), cell.projected_seconds()
        if projected is not None:  # the further this cell is, the more its own progress counts
            whole = cell.share_made * projected + (1 - cell.share_made) * whole
        return max(0.0, whole - (now - cell.began))

    def seconds(self, now: float) -> float | None:
        """Return how long all cells will still take; None while nothing is known of any."""
        costs = self._costs()
        if not costs:
            return None
        typical = statistics.fmean(costs.values())
        running = []
        for index, cell in self._running.items():
            left = self.of_cell(index, now)
            running.append(max(0.0, typical - (now - cell.began)) if left is None else left)
        waiting = [costs.get(self.outline.labels[index], typical) for index in sorted(self._waiting)]
        return _makespan(running, waiting, self._slots)

    def _costs(self) -> dict[str, float]:
        """Return the seconds of a cell of each arm of which something is known."""
        costs = {}
        for index, cell in self._running.items():
            if (projected := cell.projected_seconds()) is not None and cell.first_share < 1:
                costs[self.outline.labels[index]] = projected / (1 - cell.first_share)
        for known in (self._earlier, self._ended):
            costs |= {label: statistics.fmean(seconds) for label, seconds in known.items()}
        return costs


def _makespan(running: Sequence[float], waiting: Sequence[float], jobs: int) -> float:
    """Return when the last of some cells ends, if each takes the first free of `jobs` slots, in order."""
    ends = [*running, *[0.0] * max(0, jobs - len(running))]
    heapq.heapify(ends)
    for seconds in waiting:
        heapq.heappush(ends, heapq.heappop(ends) + seconds)
    return max(ends, default=0.0)


@dataclass(frozen=True)
class _Estimate:
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


def estimate(plan: Plan, folder: Path, found: Preflight | None = None) -> _Estimate:
    """Estimate the cost of a plan: each arm costs what it did with other seeds of the same recipe.

    An arm that the run directory has no record of is looked up in the newest run directories next to it; of one that
    has none there either, some steps were trained before.

    Args:
        found: what these have shown.
    """
    left = [
        (label, cell)
        for label, cell in zip(plan.labels, plan.cells, strict=True)
        if not (os.path.isdir(folder) and RunDirectory(folder).reusable(cell).record)
        and not (found is not None and found.is_refused(label))
    ]
    one_each = dict(left)
    alike: dict[str, list[RunRecord]] = {label: [] for label in one_each}
    for place in _places(folder):
        lacking = [label for label, found_there in alike.items() if not found_there]
        if not lacking:
            break
        records = _results(place)
        for label in lacking:
            alike[label] = [record for record in records if _is_alike(record, one_each[label])]
    unknown = tuple(label for label in plan.arms if label in alike and not alike[label])
    peaks = [record.summary.peak_bytes or 0 for records in alike.values() for record in records]
    peak = None if unknown else max(peaks, default=0)
    labels = [label for label, _ in left]
    rest = 0.0 if not unknown else None if found is None else found.estimate([one for one in labels if one in unknown])
    if rest is None:
        return _Estimate(len(left), None, peak, unknown)
    seconds = sum(_seconds(alike[label]) for label in labels if label not in unknown)
    return _Estimate(len(left), seconds + rest, peak, unknown)


def _places(folder: Path) -> list[Path]:
    """Return the run directory and the newest others next to it."""
    try:
        cells = sorted(folder.parent.glob(f"*/{RunFile.CELLS}"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        cells = []
    return [folder, *[path.parent for path in cells if path.parent != folder][:MAX_OTHERS]]


def _results(folder: Path) -> list[RunRecord]:
    try:
        return [record for record in RunDirectory(folder).records()[0] if record.status in ("completed", "diverged")]
    except RecordError:
        return []


def _is_alike(record: RunRecord, cell: RunConfig) -> bool:
    return record.config.arm == cell.arm and not changed_settings(record.config, cell)


def _seconds(records: Sequence[RunRecord]) -> float:
    return statistics.fmean(record.summary.wall_seconds or 0.0 for record in records)
