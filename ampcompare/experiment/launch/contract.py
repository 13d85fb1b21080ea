"""The contract of a launcher: a configuration and a folder in, a record out.

And the process that it works with, which one thread starts and any other may stop.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ampcompare.results.records.metric import metrics_of_script
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

Phase = Literal["starting", "loading data", "training", "evaluating", "saving"]
"""What a cell is at. It is starting until its process reports."""

Process = TypeVar("Process")


class Progress(NamedTuple):
    """How far a cell is, as it was known when losses were last read from the device.

    Attributes:
        total_steps: updates of the whole run; 0 until the data are there.
        epoch: epochs before the last update.
        loss: of the last update; None before the first.
        loss_scale: after the last update; None where nothing is scaled.
        skipped: updates that were skipped for an overflow.
        step_seconds: median time of a step, over the steps since the report before.
    """

    steps: int
    total_steps: int
    epoch: int
    phase: Phase = "training"
    loss: float | None = None
    loss_scale: float | None = None
    skipped: int = 0
    step_seconds: float | None = None


class Launcher(abc.ABC):
    """Runs cells; use it as a context, so that no process is left behind.

    `terminate` and `close` may be called while another thread waits in `launch`, at any moment of it.

    Attributes:
        is_main: whether this process prints the results; of several ranks one does.
        on_note: is called with a line for the user, for example about a process that was killed and replaced.
        may_start: returns whether a cell may still start; one that may not is an interrupted record.
    """

    is_main: bool = True
    on_note: Callable[[str], None] | None = None
    may_start: Callable[[], bool] = staticmethod(lambda: True)

    @abc.abstractmethod
    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train one cell and return its record, which is also written to `folder`.

        A cell that fails, or whose process dies, is a record with status "failed".

        Args:
            config: of the cell.
            folder: of the cell, where its files go.
            on_progress: gets the progress of the run while it trains; None for nobody.

        Raises:
            LaunchError: no process could be started at all.
            LauncherClosed: another thread closed the launcher before the cell had ended.
        """

    def report_note(self, text: str) -> None:
        """Report a line to the user, if `on_note` is set."""
        if self.on_note is not None:
            self.on_note(text)

    def is_queue(self, config: RunConfig) -> bool:
        """Return whether announced cells like this one run before `launch` is called for them, several at a time."""
        return False

    def collect_records(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        """Yield the record of each cell of a queue with its index, as it ends.

        Args:
            cells: with the folder of each.
            on_place: is called with the index of a cell that runs and where, such as "job 1234_5 on n1"; again where
                it was moved.
            on_progress: is called with the index of a cell and its progress; None for nobody.
        """
        raise NotImplementedError

    def submit_cells_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:  # noqa: B027 - most launchers have no queue
        """Announce the cells, with their folders, that `launch` is called for later; a queue takes them now."""

    def pending_message(self) -> str:
        """Return what continues after this process has ended, and how to stop it; "" if nothing does."""
        return ""

    def ask_cell_to_stop(self) -> bool:
        """Ask the processes of the current cell to save and end as "interrupted"; return False if none is running."""
        return False

    def end_cell(self) -> None:  # noqa: B027 - those of other machines end their cells themselves
        """End the current cell at once, whatever it is doing; its record then has status "interrupted"."""

    def close(self) -> None:  # noqa: B027 - many launchers keep nothing between cells
        """End every process that still runs; none starts afterwards."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# a fact of a failed record: its cell cannot be started from here, and its folder says what to do
BY_HAND = "by_hand"


def record_of_failed_cell(config: RunConfig, error: str, **environment: Any) -> RunRecord:
    """Return the record of a cell that could not write one itself, with facts such as the exit code of the command."""
    shown = {} if config.script is None else {"metrics": metrics_of_script(config.script)}
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="failed",
        config=config,
        error=error,
        environment=environment,
        **shown,
    )


def record_of_interrupted_cell(config: RunConfig) -> RunRecord:
    """Return the record of a cell that was asked to stop and could not save; earlier checkpoints are unchanged."""
    return record_of_failed_cell(config, "asked to stop before it could save").model_copy(
        update={"status": "interrupted"}
    )


class LauncherClosed(Exception):
    """The launcher was closed by another thread, which wants no record of the cell."""


class StoppableProcess(Generic[Process]):
    """At most one process at a time, and none once this is closed.

    Attributes:
        process: that runs, or was the last to run and was not dropped.
        is_asked: whether the cell that the launcher works on was asked to stop.
    """

    def __init__(self, end: Callable[[Process], None]) -> None:
        self.process: Process | None = None
        self.is_asked = False
        self._end = end
        self._lock = threading.Lock()  # held for as long as a process takes to start, not to be ready
        self._is_busy = False
        self._is_closed = False

    @contextlib.contextmanager
    def busy_with_cell(self) -> Iterator[None]:
        """Hold while the launcher works on a cell."""
        self.is_asked = False
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def ask_to_stop(self) -> bool:
        """Ask the cell to stop, whether or not its process has started; return False if there is none."""
        self.is_asked = self._is_busy
        return self._is_busy

    def start(self, make: Callable[[], Process]) -> Process:
        """Start a process; raise `LauncherClosed` if it is too late."""
        with self._lock:
            self.raise_if_closed()
            self.process = process = make()
            return process

    def raise_if_closed(self) -> None:
        """Raise `LauncherClosed` if the launcher was closed."""
        if self._is_closed:
            raise LauncherClosed

    def end_process(self) -> None:
        """End the process; another one can start."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            self._end(process)

    def close(self) -> None:
        """End the process, and let no other one start."""
        with self._lock:
            self._is_closed = True
        self.end_process()
