"""The cells of a matrix as an observer sees them: how far each is, and how long the rest will take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.formatting import printable, rough_duration
from ampcompare.experiment.eta import TimeLeft
from ampcompare.experiment.launch.contract import Phase, Progress
from ampcompare.experiment.observer import Outline
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["CellView", "MatrixView", "RunningCells"]


@dataclass(frozen=True)
class CellView:
    """A running cell as it is shown.

    Attributes:
        number: its place in the matrix, from 1.
        progress: the latest report; None while the process starts.
        seconds: since the cell began.
        left: seconds that it will still take; None while that is unknown.
        epochs: of the whole run.
        place: where it runs, such as "GPU 3" or "job 1234_5 on n1"; "" if it has no place of its own.
    """

    name: str
    number: int
    progress: Progress | None
    seconds: float
    left: float | None
    epochs: int
    place: str = ""

    @property
    def full_name(self) -> str:
        """The name with the place."""
        return f"{self.name}, {self.place}" if self.place else self.name

    @property
    def phase(self) -> Phase:
        """What the cell is at."""
        return "starting" if self.progress is None else self.progress.phase

    @property
    def share(self) -> float:
        """The share of its steps that are made, 0 to 1."""
        progress = self.progress
        return progress.steps / progress.total_steps if progress is not None and progress.total_steps else 0.0

    def figures(self, left: str = " left") -> list[str]:
        """Return what is known of it, the most important first.

        Args:
            left: what follows the time that it will still take.
        """
        figures, progress = [], self.progress
        if progress is not None and progress.loss is not None:
            figures.append(f"loss {progress.loss:.4g}")
            if progress.loss_scale is not None:
                figures.append(f"loss scale {_number(progress.loss_scale)}")
        if self.left is not None:
            figures.append(f"about {rough_duration(self.left)}{left}")
        if progress is not None and progress.step_seconds is not None:
            figures.append(_step_time(progress.step_seconds))
        if progress is not None and (progress.skipped or progress.loss_scale is not None):
            figures.append(f"{progress.skipped} skipped")
        if progress is not None and progress.total_steps and self.epochs > 1:
            figures.append(f"epoch {progress.epoch + 1}/{self.epochs}")
        return figures


@dataclass(frozen=True)
class MatrixView:
    """All cells as they are shown.

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


@dataclass
class _Cell:
    config: RunConfig
    name: str
    began: float
    place: str = ""
    progress: Progress | None = None


class RunningCells:
    """Follows the events of an observer. All times come from the caller, in seconds of one clock.

    Attributes:
        outline: of the cells; None before the first event.
        done: cells that have ended, or were there already.
    """

    def __init__(self, now: float) -> None:
        self.outline: Outline | None = None
        self.done = 0
        self._began = now
        self._left: TimeLeft | None = None
        self._running: dict[int, _Cell] = {}

    @property
    def total(self) -> int:
        """Number of all cells."""
        return 0 if self.outline is None else len(self.outline.cells)

    def plan(self, outline: Outline) -> None:
        """The cells are known."""
        self.outline, self._left, self.done = outline, TimeLeft(outline), 0

    def begin(self, config: RunConfig, number: int, total: int, now: float) -> None:
        """A cell starts."""
        if self.outline is None:  # of a caller that runs no matrix
            self.plan(Outline([config] * total, [config.arm] * total, [None] * total, Path()))
        assert self.outline is not None
        assert self._left is not None
        name = printable(f"{self.outline.labels[number - 1]}, seed {config.recipe.seed}", 60)
        self._running[number] = _Cell(config, name, now)
        self._left.begin(number - 1, now)

    def place(self, number: int, name: str) -> None:
        """A running cell is at a place."""
        if number in self._running:
            self._running[number].place = printable(name, 40)

    def report(self, number: int, progress: Progress, now: float) -> None:
        """A running cell has made progress."""
        if number in self._running and self._left is not None:
            self._running[number].progress = progress
            self._left.report(number - 1, progress, now)

    def end(self, record: RunRecord, now: float, *, reused: bool) -> CellView:
        """A cell has ended; return it."""
        number = next((n for n, cell in self._running.items() if cell.config.digest() == record.cell), None)
        number = min(self._running) if number is None else number
        view = self._view(number, now)
        del self._running[number]
        self.done += 1
        assert self._left is not None
        self._left.end(number - 1, now, reused=reused)
        return view

    def views(self, now: float) -> tuple[list[CellView], MatrixView]:
        """Return what is to be shown now."""
        left = self._left
        made = self.done + (0.0 if left is None else sum(left.share(number - 1) for number in self._running))
        seconds = None if left is None else left.seconds(now)
        matrix = MatrixView(self.done, self.total, made / max(1, self.total), now - self._began, seconds)
        return [self._view(number, now) for number in sorted(self._running)], matrix

    def _view(self, number: int, now: float) -> CellView:
        cell = self._running[number]
        left = None if self._left is None else self._left.of_cell(number - 1, now)
        epochs = 1 if cell.config.script else cell.config.recipe.epochs  # how many a script makes is not known
        return CellView(cell.name, number, cell.progress, now - cell.began, left, epochs, cell.place)


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e10 else f"{value:g}"


def _step_time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step"
