"""Train in this process, one of several that torchrun, srun or a script started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ampcompare.base.errors import ConfigError
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.cell_files import archive_previous, log_name, write_config
from ampcompare.launch.distributed_env import DistributedEnv
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["ExternalLauncher"]


class ExternalLauncher(Launcher):
    """Joins externally launched ranks. Single-use: O1 patches torch permanently.

    Args:
        world: rank and world size of this process.

    Attributes:
        is_main: whether this process prints the results: rank 0, or the rank that failed first.
    """

    def __init__(self, world: DistributedEnv) -> None:
        self.world = world
        self.is_main = world.rank == 0

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train as one of the ranks; see `Launcher.launch`.

        Raises:
            ConfigError: the number of processes that were started is not the configuration's.
        """
        from ampcompare.launch.worker.rank import run_rank

        if config.processes != self.world.size:
            raise ConfigError(
                f"the settings are for {config.processes} processes, but {self.world.size} were started; leave the "
                f"number out of the settings"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if self.world.rank == 0:
            archive_previous(folder)
            write_config(config, folder)
        record, self.is_main = run_rank(config, folder, self.world, on_progress, log=folder / log_name(self.world.rank))
        return record
