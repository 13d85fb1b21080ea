"""Several launchers as one, each with its place, for cells that run concurrently."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampcompare.experiment.launch.base import Launcher, Progress, interrupted_record
from ampcompare.experiment.launch.dispatch import make_launcher
from ampcompare.experiment.launch.places import Places
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["LauncherPool", "launcher_at"]


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
