"""Which launcher runs a cell: its processes, and who starts them, decide."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.config import RunConfig
from ampcompare.errors import UnsupportedCombination
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.processes import ProcessesLauncher
from ampcompare.launch.slurm import SlurmLauncher
from ampcompare.launch.world import world_of
from ampcompare.record import RunRecord

__all__ = ["make_launcher"]


class ByCell(Launcher):
    """Forks cells of one process, and starts the processes of others as each asks; both kinds can be in one matrix.

    Args:
        slurm_options: of sbatch, for cells whose launcher is slurm.
        options: arguments of `ProcessesLauncher`.
    """

    def __init__(self, slurm_options: Mapping[str, str] | None = None, **options: Any) -> None:
        self._slurm_options = slurm_options
        self._options = options
        self._launchers: dict[str, Launcher] = {}
        self.speaks = options.get("node_rank", 0) == 0

    def launcher_of(self, config: RunConfig) -> Launcher:
        """Return the launcher for a cell, made at its first use.

        Raises:
            UnsupportedCombination: machines that could not find each other.
        """
        kind = config.launcher
        if kind == "auto":
            kind = "torchrun" if config.processes > 1 else "auto"
        if kind not in self._launchers:
            if kind == "auto":
                self._launchers[kind] = importlib.import_module("ampcompare.launch.forked").ForkedLauncher()
            elif kind == "slurm":
                self._launchers[kind] = SlurmLauncher(self._slurm_options, nnodes=self._options.get("nnodes", 1))
            else:
                self._launchers[kind] = ProcessesLauncher(kind, **self._options)
        return self._launchers[kind]

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        return self.launcher_of(config).launch(config, folder, on_progress)

    def expect(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        by_launcher: dict[Launcher, list[tuple[RunConfig, Path]]] = {}
        for config, folder in cells:
            by_launcher.setdefault(self.launcher_of(config), []).append((config, folder))
        for launcher, share in by_launcher.items():
            launcher.expect(share)

    def remains(self) -> str:
        return "; ".join(filter(None, (launcher.remains() for launcher in self._launchers.values())))

    def terminate(self) -> bool:
        return sum(launcher.terminate() for launcher in self._launchers.values()) > 0

    def close(self) -> None:
        for launcher in self._launchers.values():
            launcher.close()


def make_launcher(
    config: RunConfig, *, several_cells: bool = False, dist_url: str | None = None, **options: Any
) -> Launcher:
    """Return the launcher for a configuration, and for others that differ in number of processes and launcher.

    Args:
        several_cells: more than one cell will be asked for.
        dist_url: where processes meet.
        options: further arguments of `ByCell`.

    Raises:
        ConfigError: the environment says that this is one of several processes, and not which.
        EnvironmentUnfit: slurm was asked for where there is none.
        UnsupportedCombination: several cells inside processes that were started for one.
    """
    world = world_of(url=dist_url)
    if world is not None and several_cells:
        raise UnsupportedCombination(
            f"this is rank {world.rank} of {world.size} that {world.launcher} has started, and a comparison starts the "
            f"processes of each cell itself; call it once, with --nproc-per-node {world.size}"
        )
    if world is not None:
        from ampcompare.launch.member import MemberLauncher

        return MemberLauncher(world)
    launcher = ByCell(dist_url=dist_url, **options)
    launcher.launcher_of(config)  # what cannot work is refused before anything runs
    return launcher
