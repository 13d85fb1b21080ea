"""A cell in this very process, which torchrun, srun or a script has started beside others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ampcompare.config import RunConfig
from ampcompare.errors import ConfigError
from ampcompare.launch.base import Launcher, Progress, log_name, set_aside, write_config
from ampcompare.launch.world import World
from ampcompare.record import RunRecord

__all__ = ["MemberLauncher"]


class MemberLauncher(Launcher):
    """Trains as one of the ranks that were started together; for one cell, since O1 patches torch for good.

    Args:
        world: the place of this process.

    Attributes:
        speaks: whether this process is the one to print: rank 0, or the rank that failed first.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.speaks = world.rank == 0

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train as one of the ranks; see `Launcher.launch`.

        Raises:
            ConfigError: the configuration is for another number of processes than were started.
        """
        from ampcompare.launch.rank import run_rank

        if config.processes != self.world.size:
            raise ConfigError(
                f"the settings are for {config.processes} processes, and {self.world.size} were started; leave the "
                "number to whoever starts them"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if self.world.rank == 0:
            set_aside(folder)
            write_config(config, folder)
        record, self.speaks = run_rank(config, folder, self.world, on_progress, log=folder / log_name(self.world.rank))
        return record
