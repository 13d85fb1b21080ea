"""Choose the launcher of each cell: this machine, Slurm or Ray."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.ranks import read_distributed_env
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.experiment.launch.contract import Launcher, Progress, record_of_interrupted_cell
from ampcompare.experiment.launch.dispatch.local import ExternalLauncher, LocalLauncher
from ampcompare.experiment.launch.dispatch.ray import RayLauncher
from ampcompare.experiment.launch.dispatch.slurm import SlurmLauncher
from ampcompare.experiment.launch.places import ANYWHERE, Place, Places
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig


class DispatchingLauncher(LocalLauncher):
    """Gives each cell to the launcher that it names; a matrix can mix them."""

    def __init__(self, slurm: Mapping[str, Any] | None = None, place: Place = ANYWHERE) -> None:
        super().__init__(place)
        self._slurm = dict(slurm or {})

    def launcher_of(self, config: RunConfig) -> Launcher:
        if config.stack is not None:
            return super().launcher_of(config)
        if config.launcher == "ray":
            return self._ensure_launcher_of_kind("ray", RayLauncher)
        if config.launcher == "slurm" and config.script is None:
            return self._ensure_launcher_of_kind("slurm", lambda: SlurmLauncher(**self._slurm))
        return super().launcher_of(config)

    def is_queue(self, config: RunConfig) -> bool:
        return self.launcher_of(config).is_queue(config)

    def collect_records(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        return self.launcher_of(cells[0][0]).collect_records(cells, on_place, on_progress)

    def submit_cells_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        by_launcher: dict[Launcher, list[tuple[RunConfig, Path]]] = {}
        for config, folder in cells:
            by_launcher.setdefault(self.launcher_of(config), []).append((config, folder))
        for launcher, share in by_launcher.items():
            launcher.submit_cells_ahead(share)

    def pending_message(self) -> str:
        return "; ".join(filter(None, (launcher.pending_message() for launcher in self._launchers.values())))


class LauncherPool(Launcher):
    """One launcher for each place, of which the caller knows which is free; `launch` is for one cell at a time.

    After `terminate` no cell starts: one that comes later is interrupted before it has begun.

    Args:
        are_equal: whether cells at any of them can be timed.
    """

    def __init__(
        self, launchers: Sequence[Launcher], *, are_equal: bool = False, names: Sequence[str] = ()
    ) -> None:
        self.names = tuple(names) or ("",) * len(launchers)
        self.are_equal = are_equal
        self._all = tuple(launchers)
        self._terminated = False
        for launcher in self._all:
            launcher.on_note = self.report_note
            launcher.may_start = self._may_start_cell

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        return self.launch_at_place(0, config, folder, on_progress)

    def launch_at_place(
        self,
        number: int,
        config: RunConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> RunRecord:
        """Train a cell at one of the places, by its number from 0."""
        if self._terminated:
            return record_of_interrupted_cell(config)
        return self._all[number].launch(config, folder, on_progress)

    def _may_start_cell(self) -> bool:
        return not self._terminated and self.may_start()

    def ask_cell_to_stop(self) -> bool:
        self._terminated = True  # first: a thread that is about to start a cell sees one or the other
        return sum(launcher.ask_cell_to_stop() for launcher in self._all) > 0

    def close(self) -> None:
        for launcher in self._all:
            launcher.close()


def launcher_for_places(places: Places, config: RunConfig, **options: Any) -> Launcher:
    """Return a launcher for as many cells at a time as there are places, by `make_launcher` with some options."""
    launchers = [make_launcher(config, several_cells=True, place=place, **options) for place in places.all]
    return (
        launchers[0]
        if len(launchers) == 1
        else LauncherPool(
            launchers, are_equal=places.can_time_cells, names=[str(place) for place in places.all]
        )
    )


def make_launcher(
    config: RunConfig, *, several_cells: bool = False, dist_url: str | None = None, **options: Any
) -> Launcher:
    """Return the launcher for a configuration, and for others that differ in the number of processes or launcher.

    Args:
        several_cells: whether more than one cell will be launched.

    Raises:
        ConfigError: the environment describes one of several processes incompletely.
        EnvironmentUnfit: the launcher is slurm and this machine has no Slurm.
        UnsupportedCombination: several cells, in one of several processes that were started together.
    """
    world = read_distributed_env(url=dist_url)
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
    launcher = DispatchingLauncher(**options)
    launcher.launcher_of(config)  # refuse what cannot work before anything runs
    return launcher
