"""Choose the launcher of a cell by its number of processes and its setting `launcher`."""

from __future__ import annotations

import importlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.ranks import DistributedEnv, world_of
from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.base.files.run_files import log_name
from ampcompare.experiment.launch.base import Launcher, LauncherClosed, Progress, interrupted_record
from ampcompare.experiment.launch.cell_files import archive_previous, write_config, write_record
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.places import ANYWHERE, Place, Places
from ampcompare.experiment.launch.slurm import SlurmLauncher
from ampcompare.runs.records.run import FellBack, RunRecord
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.validation import validate

__all__ = ["LauncherPool", "launcher_at", "make_launcher"]


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
        from ampcompare.experiment.launch.worker.rank import run_rank

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


class DispatchingLauncher(Launcher):
    """Forks cells of one process, and starts other cells by the launcher that each names; a matrix can mix them.

    Args:
        slurm: arguments of `SlurmLauncher`, for cells whose launcher is slurm.
        place: the GPUs and cores of this machine that cells use.
        options: arguments of `MultiProcessLauncher`.
    """

    def __init__(self, slurm: Mapping[str, Any] | None = None, place: Place = ANYWHERE, **options: Any) -> None:
        self.place = place
        self._slurm = dict(slurm or {})
        self._options = options
        self._launchers: dict[str, Launcher] = {}
        self._is_closed = False
        self.is_main = options.get("node_rank", 0) == 0

    def launcher_of(self, config: RunConfig) -> Launcher:
        """Return the launcher for a cell, created at its first use.

        Raises:
            UnsupportedCombination: several machines without an address at which to rendezvous.
        """
        if config.script is not None and config.launcher != "ray":
            return self._script_launcher()
        kind = config.launcher
        if kind == "auto" and config.processes > 1:
            kind = "torchrun" if self._options.get("nnodes", 1) > 1 else "spawn"
        if kind not in self._launchers:
            if kind == "auto":
                self._launchers[kind] = importlib.import_module("ampcompare.experiment.launch.forked").ForkedLauncher(
                    self.place
                )
            elif kind == "ray":
                self._launchers[kind] = importlib.import_module("ampcompare.experiment.launch.ray").RayLauncher()
            elif kind == "slurm":
                self._launchers[kind] = SlurmLauncher(**self._slurm, nnodes=self._options.get("nnodes", 1))
            else:
                self._launchers[kind] = MultiProcessLauncher(kind, place=self.place, **self._options)
            self._connect(self._launchers[kind])
        return self._launchers[kind]

    def _connect(self, launcher: Launcher) -> None:
        launcher.on_note = self.note
        launcher.may_start = lambda: self.may_start()

    def _script_launcher(self) -> Launcher:
        if "script" not in self._launchers:
            module = importlib.import_module("ampcompare.experiment.launch.script.launcher")
            self._launchers["script"] = module.ScriptLauncher(self.place)
            self._connect(self._launchers["script"])
        return self._launchers["script"]

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        launcher = self.launcher_of(config)
        if self._is_closed:  # before it was created
            raise LauncherClosed
        if not self.may_start():
            return interrupted_record(config)
        record = launcher.launch(config, folder, on_progress)
        if config.fallback_arms:
            record = self._fall_back(config, folder, on_progress, record)
        if self.place.is_limited and self.is_main:
            record = self.place.mark(record)
            write_record(record, folder)
        return record

    def _fall_back(
        self,
        config: RunConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
        record: RunRecord,
    ) -> RunRecord:
        """Train a cell that has diverged again from its start under the next arms, until one does not diverge."""
        diverged: dict[str, int] = {}
        trained = config.arm
        for arm in config.fallback_arms:
            if record.status != "diverged" or not self.may_start():
                break
            diverged[trained] = record.summary.diverged_step or 0
            self.note(f"{trained}, seed {config.recipe.seed}, has diverged at step {diverged[trained]}: now {arm}")
            trained = arm
            other = validate(RunConfig, {**config.model_dump(), "arm": arm, "on_nan": "stop"})
            record = self.launcher_of(other).launch(other, folder, on_progress)
        if not diverged:
            return record
        found = FellBack(arm=trained, diverged=diverged)
        names = {"cell": config.digest(), "arm": config.arm, "config": config, "fell_back": found}
        record = record.model_copy(update=names)
        write_config(config, folder)
        write_record(record, folder)
        return record

    def is_queue(self, config: RunConfig) -> bool:
        return self.launcher_of(config).is_queue(config)

    def collect(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        return self.launcher_of(cells[0][0]).collect(cells, on_place, on_progress)

    def submit_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        by_launcher: dict[Launcher, list[tuple[RunConfig, Path]]] = {}
        for config, folder in cells:
            by_launcher.setdefault(self.launcher_of(config), []).append((config, folder))
        for launcher, share in by_launcher.items():
            launcher.submit_ahead(share)

    def pending_message(self) -> str:
        return "; ".join(filter(None, (launcher.pending_message() for launcher in self._launchers.values())))

    def terminate(self) -> bool:
        return sum(launcher.terminate() for launcher in list(self._launchers.values())) > 0

    def end_cell(self) -> None:
        for launcher in list(self._launchers.values()):
            launcher.end_cell()

    def close(self) -> None:
        self._is_closed = True
        for launcher in list(self._launchers.values()):
            launcher.close()


class LauncherPool(Launcher):
    """Gives each cell a free launcher; at most as many calls may run concurrently as there are launchers.

    After `terminate` no cell starts: one that comes later is interrupted before it has begun.

    Args:
        are_equal: whether cells at any of them can be timed.
        names: of their places, for progress.
    """

    def __init__(self, launchers: Sequence[Launcher], *, are_equal: bool = False, names: Sequence[str] = ()) -> None:
        self.names = tuple(names) or ("",) * len(launchers)
        self.are_equal = are_equal
        self._all = tuple(launchers)
        self._terminated = False
        self.is_main = self._all[0].is_main
        self._free: queue.Queue[Launcher] = queue.Queue()
        for launcher in self._all:
            launcher.on_note = self.note
            launcher.may_start = self._may_start
            self._free.put(launcher)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        launcher = self._free.get()
        try:
            return self._launch(launcher, config, folder, on_progress)
        finally:
            self._free.put(launcher)

    def launch_at(
        self, number: int, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train a cell at one of the places, by its number from 0, which the caller knows to be free."""
        return self._launch(self._all[number], config, folder, on_progress)

    def _launch(
        self, launcher: Launcher, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None
    ) -> RunRecord:
        if self._terminated:
            return interrupted_record(config)
        return launcher.launch(config, folder, on_progress)

    def _may_start(self) -> bool:
        return not self._terminated and self.may_start()

    def terminate(self) -> bool:
        self._terminated = True  # first: a thread that is about to start a cell sees one or the other
        return sum(launcher.terminate() for launcher in self._all) > 0

    def close(self) -> None:
        for launcher in self._all:
            launcher.close()


def launcher_at(places: Places, config: RunConfig, **options: Any) -> Launcher:
    """Return a launcher for as many cells at a time as there are places.

    Args:
        options: of `make_launcher`.

    Raises:
        ConfigError, EnvironmentUnfit, UnsupportedCombination: as `make_launcher` does.
    """
    launchers = [make_launcher(config, several_cells=True, place=place, **options) for place in places.all]
    return (
        launchers[0]
        if len(launchers) == 1
        else LauncherPool(launchers, are_equal=places.are_equal, names=[str(place) for place in places.all])
    )


def make_launcher(
    config: RunConfig, *, several_cells: bool = False, dist_url: str | None = None, **options: Any
) -> Launcher:
    """Return the launcher for a configuration, and for others that differ in the number of processes or launcher.

    Args:
        several_cells: whether more than one cell will be launched.
        dist_url: address of the rendezvous.
        options: further arguments of `DispatchingLauncher`.

    Raises:
        ConfigError: the environment describes one of several processes incompletely.
        EnvironmentUnfit: the launcher is slurm and this machine has no Slurm.
        UnsupportedCombination: several cells, in one of several processes that were started together.
    """
    world = world_of(url=dist_url)
    if world is not None and several_cells:
        raise UnsupportedCombination(
            f"this is rank {world.rank} of {world.size} that {world.launcher} started, but a comparison starts the "
            f"processes of each cell itself; call it once, with --nproc-per-node {world.size}"
        )
    if world is not None and config.fallback_arms:
        raise UnsupportedCombination(
            f"on_nan {config.on_nan} starts the processes of the next arm, but {world.launcher} has started these; "
            f"call ampcompare once, with --nproc-per-node {world.size}"
        )
    if world is not None:
        return ExternalLauncher(world)
    launcher = DispatchingLauncher(dist_url=dist_url, **options)
    launcher.launcher_of(config)  # refuse what cannot work before anything runs
    return launcher
