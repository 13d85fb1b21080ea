"""Run the cells of one seed, sequentially or in parallel, and report on all of them in one thread."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ampcompare.base.errors import Ended
from ampcompare.experiment.plan import Plan
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.cell_files import write_record
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

    Attributes:
        folder: the run directory.
        jobs: cells that run at the same time; `launcher` must support that.
        begin: is called with the index of a cell when it starts.
        progress: is called with its number, from 1, and each progress.
    """

    plan: Plan
    folder: Path
    launcher: Launcher
    jobs: int
    begin: Callable[[int], None]
    progress: Callable[[int, Progress], None]

    @contextlib.contextmanager
    def running(self, indices: Sequence[int]) -> Iterator[Iterator[FinishedCell]]:
        """Yield the cells of some indices as they end; `begin` and `progress` are called while the next is awaited."""
        if self.jobs == 1:
            yield self._one_by_one(indices)
            return
        executor = ThreadPoolExecutor(self.jobs)
        try:
            yield self._in_parallel(indices, executor)
        except Ended:
            executor.shutdown(cancel_futures=True)  # the other running cells were asked to stop too, and are saving
            raise
        except BaseException:
            self.launcher.close()  # ends the cells that threads wait for
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()

    def _one_by_one(self, indices: Sequence[int]) -> Iterator[FinishedCell]:
        for index in indices:
            self.begin(index)
            yield self._run(index, functools.partial(self.progress, index + 1))

    def _in_parallel(self, indices: Sequence[int], executor: ThreadPoolExecutor) -> Iterator[FinishedCell]:
        # Worker threads put calls for this thread here, and each cell that has ended.
        news: queue.SimpleQueue[Callable[[], None] | Future[FinishedCell]] = queue.SimpleQueue()

        def run(index: int) -> FinishedCell:
            news.put(functools.partial(self.begin, index))
            report = functools.partial(self.progress, index + 1)
            cell = self._run(index, lambda progress: news.put(functools.partial(report, progress)))
            record = cell.record.model_copy(update={"jobs": self.jobs})
            write_record(record, cell_folder(self.folder, self.plan.cells[index]))
            return FinishedCell(index, record, cell.started)

        for index in indices:
            executor.submit(run, index).add_done_callback(news.put)
        left = len(indices)
        while left:
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=LOOK_SECONDS)
                if isinstance(item, Future):
                    left -= 1
                    yield item.result()
                else:
                    item()

    def _run(self, index: int, on_progress: Callable[[Progress], None]) -> FinishedCell:
        config = self.plan.cells[index]
        started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = self.launcher.launch(config, cell_folder(self.folder, config), on_progress)
        return FinishedCell(index, record, started)
