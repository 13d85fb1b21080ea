"""Run the cells of one seed, sequentially or in parallel, and report on all of them in one thread."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ampcompare.base.errors import Ended
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_order import device_of_cells
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.cell_files import write_record
from ampcompare.launch.pool import LauncherPool
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["CellRunner", "FinishedCell", "cell_folder"]

LOOK_SECONDS = 0.2  # a wait without a timeout cannot be interrupted on every system


@dataclass(frozen=True)
class FinishedCell:
    """A cell that has run: its index in the plan, its record, and when it started (ISO 8601, UTC)."""

    index: int
    record: RunRecord
    started: str


def cell_folder(folder: Path, config: RunConfig) -> Path:
    """Return the folder of a cell in a run directory; it is named by its digest, never by the text of its arm."""
    return folder / "cells" / config.digest()


@dataclass(frozen=True)
class CellRunner:
    """Runs cells of a plan.

    Where they run at the same time and can be timed, each has its device by the design of the plan, and every device
    runs its cells in order; else the next cell goes to the first device that is free.

    Attributes:
        folder: the run directory.
        jobs: cells that run at the same time; `launcher` must support that.
        begin: is called with the index of a cell when it starts.
        place: is called with its number, from 1, and where it runs, if it has a place of its own.
        progress: is called with its number, from 1, and each progress.
        by_seed: whether cells of several seeds are run together.
    """

    plan: Plan
    folder: Path
    launcher: Launcher
    jobs: int
    begin: Callable[[int], None]
    place: Callable[[int, str], None]
    progress: Callable[[int, Progress], None]
    by_seed: bool = False

    @contextlib.contextmanager
    def running(self, indices: Sequence[int]) -> Iterator[Iterator[FinishedCell]]:
        """Yield the cells of some indices as they end; `begin` and `progress` are called while the next is awaited."""
        if indices and all(self.launcher.is_queue(self.plan.cells[index]) for index in indices):
            yield self._from_queue(indices)
            return
        if self.jobs == 1:
            yield self._one_by_one(indices)
            return
        executor = ThreadPoolExecutor(self.jobs)
        stopped = threading.Event()
        try:
            yield self._in_parallel(indices, executor, stopped)
        except Ended:
            stopped.set()
            executor.shutdown(cancel_futures=True)  # the other running cells were asked to stop too, and are saving
            raise
        except BaseException:
            stopped.set()
            self.launcher.close()  # ends the cells that threads wait for
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()

    def _one_by_one(self, indices: Sequence[int]) -> Iterator[FinishedCell]:
        for index in indices:
            self.begin(index)
            yield self._run(index, functools.partial(self.progress, index + 1))

    def _from_queue(self, indices: Sequence[int]) -> Iterator[FinishedCell]:
        """Follow cells that a queue runs: one begins when it is seen at its place, or when it has ended."""
        started: dict[int, str] = {}

        def begin(index: int) -> None:
            if index not in started:
                started[index] = _now()
                self.begin(index)

        def place(number: int, name: str) -> None:
            begin(indices[number])
            self.place(indices[number] + 1, name)

        def report(number: int, progress: Progress) -> None:
            begin(indices[number])
            self.progress(indices[number] + 1, progress)

        cells = [(self.plan.cells[index], cell_folder(self.folder, self.plan.cells[index])) for index in indices]
        for number, record in self.launcher.collect(cells, place, report):
            begin(indices[number])
            yield FinishedCell(indices[number], record, started[indices[number]])

    def _in_parallel(
        self, indices: Sequence[int], executor: ThreadPoolExecutor, stopped: threading.Event
    ) -> Iterator[FinishedCell]:
        # Worker threads put calls for this thread here, and each cell that has ended.
        news: queue.SimpleQueue[Callable[[], None] | FinishedCell | Future[None]] = queue.SimpleQueue()

        def run(index: int, device: int) -> None:
            name = self.launcher.names[device] if isinstance(self.launcher, LauncherPool) else ""
            news.put(functools.partial(self.begin, index))
            if name:
                news.put(functools.partial(self.place, index + 1, name))
            report = functools.partial(self.progress, index + 1)
            cell = self._run(index, lambda progress: news.put(functools.partial(report, progress)), device)
            record = cell.record.model_copy(update={"jobs": self.jobs})
            write_record(record, cell_folder(self.folder, self.plan.cells[index]))
            news.put(FinishedCell(index, record, cell.started))

        def run_all(waiting: deque[int], device: int) -> None:
            with contextlib.suppress(IndexError):  # none is left
                while not stopped.is_set():
                    run(waiting.popleft(), device)

        for device, waiting in enumerate(self._queues(indices)):
            executor.submit(run_all, waiting, device).add_done_callback(news.put)
        left = len(indices)
        while left:
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=LOOK_SECONDS)
                if isinstance(item, FinishedCell):
                    left -= 1
                    yield item
                elif isinstance(item, Future):
                    item.result()  # raises what ended a thread
                else:
                    item()

    def _queues(self, indices: Sequence[int]) -> list[deque[int]]:
        """Return for each device the cells that it runs; without a design they share one queue."""
        if not isinstance(self.launcher, LauncherPool) or not self.launcher.are_equal:
            return [deque(indices)] * self.jobs
        plan = self.plan
        rows = device_of_cells(plan.arms, len(plan.seeds), self.jobs, plan.order_seed, by_seed=self.by_seed)
        of_seed = dict(zip(plan.seeds, rows, strict=True))
        queues: list[deque[int]] = [deque() for _ in range(self.jobs)]
        for index in indices:
            queues[of_seed[plan.cells[index].recipe.seed][plan.labels[index]]].append(index)
        return queues

    def _run(self, index: int, on_progress: Callable[[Progress], None], device: int | None = None) -> FinishedCell:
        config = self.plan.cells[index]
        folder = cell_folder(self.folder, config)
        started = _now()
        if device is not None and isinstance(self.launcher, LauncherPool):
            record = self.launcher.launch_at(device, config, folder, on_progress)
        else:
            record = self.launcher.launch(config, folder, on_progress)
        return FinishedCell(index, record, started)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
