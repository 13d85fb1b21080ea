"""The cells of a matrix as an observer sees them: how far each is, and how long the rest will take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.formatting import format_rough_duration, printable_line
from ampcompare.experiment.launch.contract import Phase, Progress
from ampcompare.experiment.observer import PlanOutline
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

FIRST_SHARE = 0.02  # of the steps of a cell: below it, they say little about the whole


@dataclass
class CellView:
    """A running cell.

    Attributes:
        number: its place in the matrix, from 1.
        progress: the latest report; None while the process starts.
        seconds: since the cell began, when it was last looked at.
        left: seconds that it will still take from then on; None while that is unknown.
        epochs: of the whole run.
        place: where it runs, such as "GPU 3" or "job 1234_5 on n1"; "" if it has no place of its own.
        label, digest: of its row, and of its settings.
        first: when its first steps were reported, and their share of all: above 0 in a resumed cell.
    """

    name: str
    number: int
    progress: Progress | None
    seconds: float
    left: float | None
    epochs: int
    place: str = ""
    label: str = ""
    digest: str = ""
    began: float = 0.0
    first: tuple[float, float] | None = None
    latest: float = 0.0

    @property
    def full_name(self) -> str:
        """The name with the place."""
        return f"{self.name}, {self.place}" if self.place else self.name

    @property
    def phase(self) -> Phase:
        """What the cell is at."""
        return "starting" if self.progress is None else self.progress.phase

    @property
    def share_of_steps_made(self) -> float:
        """The share of its steps that are made, 0 to 1."""
        return _share_done(self.progress)

    def add_progress(self, progress: Progress, now: float) -> None:
        """Add progress; one of fewer steps is of another process that trains the cell again.

        Args:
            progress: of the cell.
            now: seconds of a clock that never goes back.
        """
        is_again = _share_done(progress) < self.share_of_steps_made
        self.progress, self.latest = progress, now
        if progress.total_steps and (self.first is None or is_again):
            self.first = now, self.share_of_steps_made

    def seconds_left(self, now: float) -> float | None:
        """Return how long it takes at the pace of its own steps; None while these are too few."""
        begun, first = self.first or (now, self.share_of_steps_made)
        made = self.share_of_steps_made - first
        return (
            None if made < FIRST_SHARE else max(0.0, (self.latest - begun) * (1 - first) / made + begun - now)
        )

    def known_number_texts(self, time_left_suffix: str = " left") -> list[str]:
        """Return what is known of it, the most important first; the suffix follows the time that it will still take."""
        figures, progress = [], self.progress
        if progress is not None and progress.loss is not None:
            figures.append(f"loss {progress.loss:.4g}")
            if progress.loss_scale is not None:
                figures.append(f"loss scale {progress.loss_scale:.10g}")
        if self.left is not None:
            figures.append(f"about {format_rough_duration(self.left)}{time_left_suffix}")
        if progress is not None and progress.step_seconds is not None:
            seconds = progress.step_seconds
            figures.append(f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step")
        if progress is not None and (progress.skipped or progress.loss_scale is not None):
            figures.append(f"{progress.skipped} skipped")
        if progress is not None and progress.total_steps and self.epochs > 1:
            figures.append(f"epoch {progress.epoch + 1}/{self.epochs}")
        return figures

    def phase_steps_and_figures(self, time_left_suffix: str = " left") -> list[str]:
        """Return its phase, its steps and its figures."""
        progress = self.progress
        steps = (
            [f"step {progress.steps} of {progress.total_steps}"] if progress and progress.total_steps else []
        )
        return [self.phase, *steps, *self.known_number_texts(time_left_suffix)]


@dataclass(frozen=True)
class MatrixProgress:
    """How far all cells together are, as it is shown.

    Attributes:
        done: cells that ended, or were there already.
        share: of the work that is done, by cells, 0 to 1.
        seconds: since the start.
        left: seconds that all cells will still take; None while that is unknown.
    """

    done: int
    total: int
    share: float
    seconds: float
    left: float | None


class RunningCells:
    """Follows the events of an observer. All times come from the caller, in seconds of one clock.

    A running cell takes as long as its steps so far say. An arm takes the mean of its cells that ran in this call; else
    of its earlier records; else what its running cell takes; else the mean of the arms of which something is known.

    Attributes:
        outline: of the cells; None before the first event.
        done: cells that have ended, or were there already.
    """

    def __init__(self, now: float) -> None:
        self.outline: PlanOutline | None = None
        self.done = 0
        self._began = now
        self._running: dict[int, CellView] = {}
        self._waiting: list[str] = []  # labels of cells that have not begun
        self._slots = 1  # a queue runs as many cells at a time as it likes
        self._earlier: dict[str, list[float]] = {}
        self._ended: dict[str, list[float]] = {}

    @property
    def total(self) -> int:
        """Number of all cells."""
        return 0 if self.outline is None else len(self.outline.cells)

    def note_plan(self, outline: PlanOutline) -> None:
        """The cells are known."""
        self.outline = outline
        self.done = 0
        self._slots = outline.jobs
        cells = list(zip(outline.labels, outline.cached, strict=True))
        self._waiting = [label for label, record in cells if record is None]
        self._earlier, self._ended = {}, {}
        for label, record in cells:
            if record is not None and record.jobs == outline.jobs and record.summary.wall_seconds:
                self._earlier.setdefault(label, []).append(record.summary.wall_seconds)

    def note_begun_cell(self, config: RunConfig, number: int, total: int, now: float) -> None:
        """A cell starts.

        Args:
            config: of the cell.
            number: its place in the matrix, from 1.
            total: how many cells there are.
            now: seconds of a clock that never goes back.
        """
        if self.outline is None:  # of a caller that runs no matrix
            self.note_plan(PlanOutline([config] * total, [config.arm] * total, [None] * total, Path()))
        assert self.outline is not None
        label = self.outline.labels[number - 1]
        name = printable_line(f"{label}, seed {config.recipe.seed}", 60)
        epochs = 1 if config.script else config.recipe.epochs  # how many a script makes is not known
        self._running[number] = CellView(
            name, number, None, 0.0, None, epochs, label=label, digest=config.digest(), began=now
        )
        if self.outline.cached[number - 1] is None:
            self._waiting.remove(label)
        self._slots = max(self._slots, len(self._running))

    def note_place(self, number: int, name: str) -> None:
        """A running cell is at a place.

        Args:
            number: of the cell in the matrix, from 1.
            name: of the place, such as "cuda:1".
        """
        if number in self._running:
            self._running[number].place = printable_line(name, 40)

    def note_progress(self, number: int, progress: Progress, now: float) -> None:
        """A running cell has made progress.

        Args:
            number: of the cell in the matrix, from 1.
            progress: of the cell.
            now: seconds of a clock that never goes back.
        """
        if number in self._running:
            self._running[number].add_progress(progress, now)

    def note_ended_cell(self, record: RunRecord, now: float, *, reused: bool) -> CellView:
        """A cell has ended; return it.

        Args:
            record: of the cell.
            now: seconds of a clock that never goes back.
            reused: whether the record is of an earlier call.
        """
        number = next(
            (n for n, cell in self._running.items() if cell.digest == record.cell), min(self._running)
        )
        cell = self._update_cell_view(self._running[number], now)
        del self._running[number]
        self.done += 1
        # else an earlier call has made a part of it
        if not reused and (cell.first is None or cell.first[1] == 0):
            self._ended.setdefault(cell.label, []).append(now - cell.began)
        return cell

    def cell_views_and_matrix_progress(self, now: float) -> tuple[list[CellView], MatrixProgress]:
        """Return what is to be shown now."""
        made = self.done + sum(cell.share_of_steps_made for cell in self._running.values())
        matrix = MatrixProgress(
            self.done, self.total, made / max(1, self.total), now - self._began, self._seconds_left(now)
        )
        return [
            self._update_cell_view(self._running[number], now) for number in sorted(self._running)
        ], matrix

    def _seconds_left(self, now: float) -> float | None:
        """Return how long all cells will still take; None while nothing is known of any."""
        costs = self._seconds_by_arm(now)
        if not costs:
            return 0.0 if self.outline is not None and not (self._waiting or self._running) else None
        typical = statistics.fmean(costs.values())
        running = [
            self._seconds_left_of_cell(cell, costs.get(cell.label, typical), now)
            for cell in self._running.values()
        ]
        waiting = [costs.get(label, typical) for label in self._waiting]
        return max([sum(running + waiting) / self._slots, *running])

    def _seconds_left_of_cell(self, cell: CellView, cost: float, now: float) -> float:
        own = cell.seconds_left(now)
        return max(0.0, cost + cell.began - now) if own is None else own

    def _seconds_by_arm(self, now: float) -> dict[str, float]:
        """Return the seconds of a cell of each arm of which something is known."""
        costs = {
            cell.label: now - cell.began + left
            for cell in self._running.values()
            if (left := cell.seconds_left(now)) is not None
        }
        for known in (self._earlier, self._ended):
            costs |= {label: statistics.fmean(seconds) for label, seconds in known.items()}
        return costs

    def _update_cell_view(self, cell: CellView, now: float) -> CellView:
        cost = self._seconds_by_arm(now).get(cell.label)
        cell.seconds = now - cell.began
        cell.left = None if cost is None else self._seconds_left_of_cell(cell, cost, now)
        return cell


def _share_done(progress: Progress | None) -> float:
    """Return the share of steps that are made, 0 to 1."""
    return (
        min(1.0, progress.steps / progress.total_steps)
        if progress is not None and progress.total_steps
        else 0.0
    )
