"""What the queues of Slurm and Ray have in common: cells that run before anyone waits for them."""

import abc
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ampcompare.experiment.launch.cell_files import make_forwarder_of_progress
from ampcompare.experiment.launch.contract import Launcher, Progress
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig


class QueueLauncher(Launcher):
    """A launcher whose announced cells run before anyone waits for them. The folders of cells are absolute paths."""

    @abc.abstractmethod
    def wait_for_ended_cells(self, folders: Collection[Path]) -> set[Path]:
        """Return the folders of cells that have ended, after a short wait where none has."""

    @abc.abstractmethod
    def take_record_of_ended_cell(self, config: RunConfig, folder: Path) -> RunRecord:
        """Return the record of a cell that has ended, which is then forgotten."""

    def collect_records(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        left = {index: (config, folder.resolve()) for index, (config, folder) in enumerate(cells)}
        self.submit_cells_ahead(list(left.values()))
        readers = {}
        for index, (_, folder) in left.items():
            report = None if on_progress is None else functools.partial(on_progress, index)
            readers[index] = make_forwarder_of_progress(folder, report, functools.partial(on_place, index))
        while left:
            ended = self.wait_for_ended_cells([folder for _, folder in left.values()])
            for index, (config, folder) in list(left.items()):
                readers[index]()
                if folder in ended:
                    del left[index]
                    yield index, self.take_record_of_ended_cell(config, folder)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        report = None if on_progress is None else lambda index, progress: on_progress(progress)
        return next(self.collect_records([(config, folder)], on_progress=report))[1]

    def is_queue(self, config: RunConfig) -> bool:
        return True
