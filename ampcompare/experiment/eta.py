"""How long the rest of a matrix will take: every arm has its own cost.

An arm costs the mean of its cells that ran in this call; else of its records that were there before; else the
projection of its running cell; else the mean of the arms whose cost is known. A cached cell costs nothing. The start of
a process counts apart from the work, since the first one loads the libraries for all others. The last report is assumed
to take as long as the one before it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import RunFile
from ampcompare.experiment.launch.base import Progress
from ampcompare.experiment.observer import Outline
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.timing_rounds import TIMED_STEPS
from ampcompare.runs.analysis.runs.comparability import changed_settings
from ampcompare.runs.records.preflight import Preflight
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["TimeLeft", "estimate"]

FIRST_SHARE = 0.02  # of the steps of a cell: below it, they say little about the whole
MAX_OTHERS = 20  # run directories whose records are read
MAX_GAP = 10.0  # seconds between two cells of one call


@dataclass
class _Running:
    """A running cell; times are those of the caller's clock."""

    began: float
    reported: float | None = None
    trained: float | None = None
    latest: float = 0.0
    first_share: float = 0.0
    share: float = 0.0

    def add(self, progress: Progress, now: float) -> None:
        if self.reported is None:
            self.reported = now
        self.latest = now
        if progress.total_steps:
            share = min(1.0, progress.steps / progress.total_steps)
            if share < self.share:  # its process was lost, and another one trains it again
                self.reported, self.trained = now, None
            self.share = share
            if self.trained is None:
                self.trained, self.first_share = now, self.share  # above 0 in a resumed cell

    @property
    def made(self) -> float:
        """The share of the steps of this call that are made, 0 to 1; a resumed cell has others before them."""
        return (self.share - self.first_share) / (1 - self.first_share) if self.first_share < 1 else 1.0

    @property
    def setup(self) -> float:
        """Seconds from the first report to the first step."""
        return 0.0 if self.reported is None or self.trained is None else self.trained - self.reported

    def projected(self) -> float | None:
        """Return the projected seconds of work of the cell in this call; None while unknown."""
        if self.trained is None or self.made < FIRST_SHARE:
            return None
        return self.setup + (self.latest - self.trained) / self.made


class TimeLeft:
    """Follows the cells of an outline. All times come from the caller, in seconds of one clock."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        count = len(outline.cells)
        size = max(1, count if outline.together else len(outline.arms))
        self._blocks = [range(start, min(start + size, count)) for start in range(0, count, size)]
        self._waiting = {index for index, record in enumerate(outline.cached) if record is None}
        self._running: dict[int, _Running] = {}
        self._slots = outline.jobs  # a queue runs as many cells at a time as it likes
        self._work: dict[str, list[float]] = {}
        self._starts: list[float] = []
        self._report_seconds = 0.0  # from the last sign of the latest cell until its report was written
        self._all_ended: float | None = None
        self._steps: dict[str, float] = {}
        self._setups: dict[str, float] = {}
        self._earlier: dict[str, list[float]] = {}
        for label, record in zip(outline.labels, outline.cached, strict=True):
            if record is not None and record.jobs == outline.jobs and record.summary.wall_seconds:
                self._earlier.setdefault(label, []).append(record.summary.wall_seconds)
        self._gaps: list[float] = []  # from the end of a block to the next: timing rounds
        self._block_ended: float | None = None
        self._rounds_left = [outline.timing_rounds > 0 and any(p in self._waiting for p in b) for b in self._blocks]

    def begin(self, index: int, now: float) -> None:
        """Record the start of a cell, by its index from 0."""
        if self._block_ended is not None:
            self._gaps.append(now - self._block_ended)
            self._block_ended = None
            for number in range(self._block_of(index)):
                self._rounds_left[number] = False
        self._waiting.discard(index)
        self._running[index] = _Running(now)
        self._slots = max(self._slots, len(self._running))

    def report(self, index: int, progress: Progress, now: float) -> None:
        """Record the progress of a running cell."""
        cell = self._running.get(index)
        if cell is None:
            return
        cell.add(progress, now)
        label = self.outline.labels[index]
        if cell.trained is not None:
            self._setups[label] = cell.setup
        if progress.step_seconds is not None:
            self._steps[label] = progress.step_seconds

    def end(self, index: int, now: float, *, reused: bool = False) -> None:
        """Record the end of a cell, with the report on it written, unless it is the last one."""
        cell = self._running.pop(index, None)
        if cell is not None and not reused:
            start = cell.began if cell.reported is None else cell.reported
            whole = (now - start) / max(FIRST_SHARE, 1 - cell.first_share)
            self._work.setdefault(self.outline.labels[index], []).append(whole)
            if cell.reported is not None and (self._running or self._waiting):
                self._report_seconds = now - cell.latest
            self._starts.append(start - cell.began)
        block = self._blocks[self._block_of(index)]
        if not any(other in self._running or other in self._waiting for other in block):
            self._block_ended = now
        if not self._running and not self._waiting:
            self._all_ended = now

    def share(self, index: int) -> float:
        """Return the share of its steps that a running cell has made, 0 to 1."""
        return self._running[index].share if index in self._running else 0.0

    def of_cell(self, index: int, now: float) -> float | None:
        """Return how long a running cell will still take; None while that is unknown."""
        cell = self._running.get(index)
        if cell is None:
            return None
        projected, known = cell.projected(), self._known_costs().get(self.outline.labels[index])
        if known is None:
            return None
        whole = known * (1 - cell.first_share)
        if projected is not None:  # the further this cell is, the more its own progress counts
            whole = cell.made * projected + (1 - cell.made) * whole
        if cell.made == 0:
            worked = 0.0 if cell.reported is None else now - cell.reported
            return max(0.0, whole - worked)
        return max(0.0, whole - cell.setup) * (1 - cell.made)

    def seconds(self, now: float) -> float | None:
        """Return how long all cells will still take; None while nothing is known of any."""
        costs = self._known_costs()
        if not costs:
            return None
        typical = statistics.fmean(costs.values())
        start = statistics.median(self._starts[1:]) if len(self._starts) > 1 else 0.0
        total = 0.0
        for number, block in enumerate(self._blocks):
            running = []
            for index in block:
                if index in self._running:
                    left = self.of_cell(index, now)
                    worked = now - (self._running[index].reported or now)
                    running.append(max(0.0, typical - worked) if left is None else left)
            waiting = [
                costs.get(self.outline.labels[index], typical) + start for index in block if index in self._waiting
            ]
            total += _makespan(running, waiting, self._slots)
            if self._rounds_left[number]:
                total += self._rounds(now, is_running=not running and not waiting)
        return total + max(0.0, self._report_seconds - (0.0 if self._all_ended is None else now - self._all_ended))

    def _rounds(self, now: float, *, is_running: bool) -> float:
        """Return how long the timing rounds of a block will take, or still take if they run."""
        if self._gaps:
            whole = statistics.fmean(self._gaps)
        else:
            steps = TIMED_STEPS + self.outline.cells[0].warmup_steps
            turns = [self._setups[arm] + steps * seconds for arm, seconds in self._steps.items() if arm in self._setups]
            whole = self.outline.timing_rounds * len(self.outline.arms) * statistics.fmean(turns) if turns else 0.0
        return max(0.0, whole - (now - self._block_ended)) if is_running and self._block_ended is not None else whole

    def _known_costs(self) -> dict[str, float]:
        """Return the seconds of work of a cell of each arm of which something is known."""
        costs = {}
        for index, cell in self._running.items():
            if (projected := cell.projected()) is not None and cell.first_share < 1:
                costs[self.outline.labels[index]] = projected / (1 - cell.first_share)
        costs |= {label: statistics.fmean(seconds) for label, seconds in self._earlier.items()}
        costs |= {label: statistics.fmean(seconds) for label, seconds in self._work.items()}
        return costs

    def _block_of(self, index: int) -> int:
        return next(number for number, block in enumerate(self._blocks) if index in block)


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
    between: list[float] = []
    for place in _places(folder):
        lacking = [label for label, found_there in alike.items() if not found_there]
        if not lacking:
            break
        records = _results(place)
        for label in lacking:
            alike[label] = [record for record in records if _is_alike(record, one_each[label])]
        if any(alike[label] for label in lacking):
            between += _between(records)
    unknown = tuple(label for label in plan.arms if label in alike and not alike[label])
    peaks = [record.summary.peak_bytes or 0 for records in alike.values() for record in records]
    peak = None if unknown else max(peaks, default=0)
    labels = [label for label, _ in left]
    rest = 0.0 if not unknown else None if found is None else found.estimate([one for one in labels if one in unknown])
    if rest is None:
        return _Estimate(len(left), None, peak, unknown)
    start = statistics.median(between) if between else 0.0
    seconds = sum(_seconds(alike[label]) + start for label in labels if label not in unknown)
    return _Estimate(len(left), seconds + rest, peak, unknown)


def _between(records: Sequence[RunRecord]) -> list[float]:
    """Return the seconds between cells that ran one after the other: a process starts, and a report is written."""
    walls = [(datetime.fromisoformat(one.started), one.summary.wall_seconds or 0.0) for one in records if one.started]
    walls.sort()
    gaps = [(after - began).total_seconds() - wall for (began, wall), (after, _) in itertools.pairwise(walls)]
    return [gap for gap in gaps if 0 <= gap < MAX_GAP]


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
