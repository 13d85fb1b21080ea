"""Progress events of a run: the planned cells, and the progress of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.experiment.launch.contract import Progress
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig


@dataclass(frozen=True)
class PlanOutline:
    """What is about to run.

    Attributes:
        cells: in the order in which they run, in blocks of one seed.
        labels: the row of each cell: its arm, and what is varied.
        cached: the record of each cell that has one and will not run; None for the others.
        timing_rounds: times that every arm of a seed is timed again after its runs.
    """

    cells: Sequence[RunConfig]
    labels: Sequence[str]
    cached: Sequence[RunRecord | None]
    folder: Path
    jobs: int = 1
    timing_rounds: int = 0

    @property
    def arms(self) -> list[str]:
        """The rows, in the order in which they first run."""
        return list(dict.fromkeys(self.labels))

    @property
    def seeds(self) -> list[int]:
        """The seeds, sorted."""
        return sorted({cell.recipe.seed for cell in self.cells})

    @property
    def num_cached(self) -> int:
        """Cells that will not run."""
        return sum(record is not None for record in self.cached)


class Observer:
    """Receives progress events, all in the thread that called; the default ignores them.

    The number of a cell is its place in the matrix, from 1. With several cells in parallel their events alternate.
    """

    def plan(self, outline: PlanOutline) -> None:
        """The cells are known, and none has started; a search for the number of seeds may plan more later."""

    def preflight(self, lines: Sequence[str]) -> None:
        """A few steps of each arm were tried, and this is what they showed."""

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        """A cell starts.

        Args:
            config: of the cell.
            number: of the cell.
            total: how many cells there are.
        """

    def place(self, number: int, name: str) -> None:
        """A cell that has started runs at a place, such as "GPU 3", "cores 0-3" or "job 12_3 on n1"; it may move.

        Args:
            number: of the cell.
            name: of the place.
        """

    def progress(self, number: int, progress: Progress) -> None:
        """A running cell has reported its progress.

        Args:
            number: of the cell.
            progress: how far it is, with its last loss.
        """

    def end(self, record: RunRecord, *, reused: bool) -> None:
        """A cell has ended, or already had a record.

        Args:
            record: of the cell.
            reused: whether an earlier call has made it.
        """

    def note(self, text: str) -> None:
        """There is a message for the user."""
